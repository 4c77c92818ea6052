"""The models that are trained end to end, with the shapes of their batches. Nothing but torch is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo.models import GPT

VOCABULARY = 50_304


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, [N, C, H, W] -> [N, 4 * width, H / stride, W / stride]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *normed(channels, width, 1),
            nn.ReLU(inplace=True),
            *normed(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *normed(width, 4 * width, 1),
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(*normed(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def normed(channels: int, out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution and its batch norm."""
    return nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)


class ResNet(nn.Module):
    """ResNet (He et al. 2015) with bottlenecks, images [N, 3, H, W] -> logits [N, 1000]. (3, 4, 6, 3) is ResNet-50."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [*normed(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = width
        for i, count in enumerate(blocks):
            for k in range(count):
                layers.append(Bottleneck(channels, width << i, 2 if i and not k else 1))
                channels = 4 * (width << i)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).mean((2, 3)))


class LanguageLSTM(nn.Module):
    """Token ids [N, T] -> logits [N, T, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


@dataclass(frozen=True)
class Example:
    """A model and its batch.

    Attributes:
        name: of the model.
        unit: what is counted, tokens or images.
        count: of these in a batch.
        model: makes it.
        batch: inputs and targets.
        compiled: the modules of it that are compiled, each by itself: equal ones share their code.
    """

    name: str
    unit: str
    count: int
    model: Callable[[], nn.Module]
    batch: Callable[[torch.device], tuple[Tensor, Tensor]]
    compiled: type[nn.Module] | None = None


def texts(vocabulary: int, n: int, length: int) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    """Random text and, as targets, the same text one on."""

    def batch(device: torch.device) -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocabulary, (n, length + 1), device=device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return batch


def images(n: int, size: int) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    """Random images and labels."""

    def batch(device: torch.device) -> tuple[Tensor, Tensor]:
        pictures = torch.randn(n, 3, size, size, device=device).to(memory_format=torch.channels_last)
        return pictures, torch.randint(1000, (n,), device=device)

    return batch


def examples(tiny: bool) -> tuple[Example, Example, Example]:
    """GPT, ResNet and LSTM; tiny ones to try the stage out."""
    block = type(GPT(2, 2, 1, 4, 1).blocks[0])
    if tiny:
        return (
            Example("GPT", "tokens", 16, lambda: GPT(32, 8, 2, 16, 2), texts(32, 2, 8), block),
            Example("ResNet", "images", 2, lambda: ResNet((1, 1), 4), images(2, 32)),
            Example("LSTM", "tokens", 16, lambda: LanguageLSTM(32, 8, 1), texts(32, 2, 8)),
        )
    gpt = Example(
        "GPT, 354M parameters, 8 x 1024 tokens",
        "tokens",
        8 * 1024,
        lambda: GPT(VOCABULARY, 1024, 24, 1024, 16),
        texts(VOCABULARY, 8, 1024),
        block,
    )
    resnet = Example("ResNet-50, 256 images", "images", 256, ResNet, images(256, 224))
    lstm = Example(
        "LSTM, 2 layers of 1024, 64 x 128 tokens",
        "tokens",
        64 * 128,
        lambda: LanguageLSTM(32_000, 1024, 2),
        texts(32_000, 64, 128),
    )
    return gpt, resnet, lstm
