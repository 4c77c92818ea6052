"""The models that are trained end to end, with the shapes of their batches: BERT of transformers, ResNet-50 of timm.

Weights are random. Where transformers is missing, GPT of examples/demo is trained instead, which needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from examples.demo.models import GPT


class Logits(nn.Module):
    """A model of transformers, token ids [N, T] -> logits [N, T, vocabulary]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


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
        block: the kind of its equal parts, which are compiled, or are units of FSDP2, each by itself.
        lr: with which it is trained.
    """

    name: str
    unit: str
    count: int
    model: Callable[[], nn.Module]
    batch: Callable[[torch.device], tuple[Tensor, Tensor]]
    block: type[nn.Module] | None = None
    lr: float = 1e-4


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


def gpt(name: str, vocabulary: int, width: int, layers: int, n: int, length: int, heads: int) -> Example:
    """GPT on `n` texts."""
    block = type(GPT(2, 2, 1, 4, 1).blocks[0])
    make = lambda: GPT(vocabulary, width, layers, length, heads)  # noqa: E731
    return Example(name, "tokens", n * length, make, texts(vocabulary, n, length), block)


def bert(tiny: bool) -> Example:
    """BERT-base, or a tiny one."""
    from transformers import BertConfig, BertForMaskedLM
    from transformers.models.bert.modeling_bert import BertLayer

    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=100, **small) if tiny else BertConfig()
    n, length = (2, 8) if tiny else (32, 512)
    name = "BERT, 2 x 8 tokens" if tiny else "BERT-base, 110M parameters, 32 x 512 tokens"
    make = lambda: Logits(BertForMaskedLM(config))  # noqa: E731
    return Example(name, "tokens", n * length, make, texts(config.vocab_size, n, length), BertLayer)


def resnet(tiny: bool) -> Example:
    """ResNet-50, or the smaller 18 on tiny images."""
    import timm

    kind, n, size = ("resnet18", 2, 32) if tiny else ("resnet50", 256, 224)
    return Example(f"{kind}, {n} images", "images", n, lambda: timm.create_model(kind), images(n, size))


def examples(tiny: bool) -> Iterator[Example]:
    """A transformer, ResNet where timm is, an LSTM."""
    if find_spec("transformers"):
        yield bert(tiny)
    elif tiny:
        yield gpt("GPT", 32, 8, 2, n=2, length=8, heads=2)
    else:
        yield gpt("GPT, 354M parameters, 8 x 1024 tokens", 50_304, 1024, 24, n=8, length=1024, heads=16)
    if find_spec("timm"):
        yield resnet(tiny)
    if tiny:
        yield Example("LSTM", "tokens", 16, lambda: LanguageLSTM(32, 8, 1), texts(32, 2, 8))
    else:
        make, batch = lambda: LanguageLSTM(32_000, 1024, 2), texts(32_000, 64, 128)
        yield Example("LSTM, 2 layers of 1024, 64 x 128 tokens", "tokens", 64 * 128, make, batch)
