"""Tiny models for the whole suite, each with batches it can learn from and a loss.

Every class is at module level, so that a model pickles. Sizes stay where float16 on a CPU is quick and
where no gradient leaves the range of float16 at the initial loss scale of 2**16. No layer before a batch norm
has a bias: its gradient is rounding noise, which Adam would blow up to full steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Mlp(nn.Sequential):
    """Linear, ReLU, Linear: [N, 8] -> [N, 4]."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


class NormedMlp(nn.Sequential):
    """A multilayer perceptron with batch norm, the cheapest model with FP32 parameters at O2: [N, 8] -> [N, 4]."""

    def __init__(self) -> None:
        layers = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
        super().__init__(*layers)


class Cnn(nn.Module):
    """Convolution, batch norm, ReLU, pool, classifier: [N, 1, 8, 8] -> [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        nn.init.normal_(self.conv.weight)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 4 * 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = F.avg_pool2d(F.relu(self.norm(self.conv(images))), 2)
        return self.head(features.flatten(1))


class Lstm(nn.Module):
    """An LSTM read out at its last step: [N, T, 4] -> [N, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 12, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, sequences: Tensor) -> Tensor:
        outputs, _ = self.lstm(sequences)
        return self.head(outputs[:, -1])


class Transformer(nn.Module):
    """One encoder layer over tokens: [N, T] int64 -> [N, T, 11]."""

    VOCABULARY = 11

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, 16)
        self.position = nn.Parameter(torch.randn(6, 16) * 0.1)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, self.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens) + self.position))


def _regression_batch(generator: torch.Generator) -> Batch:
    teacher = torch.randn(8, 4, generator=torch.Generator().manual_seed(99)) / (2 * 8**0.5)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, inputs @ teacher


def _image_batch(generator: torch.Generator) -> Batch:
    patterns = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(98))
    labels = torch.randint(3, (8,), generator=generator)
    noise = torch.randn(8, 1, 8, 8, generator=generator)
    return patterns[labels] + 0.3 * noise, labels


def _sequence_batch(generator: torch.Generator) -> Batch:
    sequences = torch.randn(8, 5, 4, generator=generator)
    return sequences, 0.5 * sequences.mean(1)[:, :2]


def _token_batch(generator: torch.Generator) -> Batch:
    starts = torch.randint(Transformer.VOCABULARY, (6, 1), generator=generator)
    tokens = (starts + 3 * torch.arange(7)) % Transformer.VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Task:
    """A model, its batches and its loss."""

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    criterion: Callable[[Tensor, Tensor], Tensor]

    def model(self, seed: int = 0) -> nn.Module:
        """The same model for the same seed; the global random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def batch(self, index: int = 0) -> Batch:
        """Batch number `index`, the same on every call."""
        return self.make_batch(torch.Generator().manual_seed(1000 + index))

    def batches(self, count: int) -> Iterator[Batch]:
        return (self.batch(index) for index in range(count))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return self.criterion(model(inputs), targets)


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


MLP = Task("mlp", Mlp, _regression_batch, mse)
NORMED_MLP = Task("normed_mlp", NormedMlp, _regression_batch, mse)
CNN = Task("cnn", Cnn, _image_batch, cross_entropy)
LSTM = Task("lstm", Lstm, _sequence_batch, mse)
TRANSFORMER = Task("transformer", Transformer, _token_batch, token_loss)

TASKS = {task.name: task for task in (MLP, CNN, LSTM, TRANSFORMER)}
