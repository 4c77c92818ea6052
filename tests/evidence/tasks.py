"""Four small models on real data, each trained from a seed at a level."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine import amp
from examples.demo.data import load_digits, load_topics
from examples.demo.models import GPT, DigitsCNN

REFERENCE = "O0"
LEVELS = {
    REFERENCE: {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5, split masters": {"opt_level": "O5", "master_weights": "split"},
    "O5, bfloat16 moments": {"opt_level": "O5", "moment_dtype": torch.bfloat16},
    "O5, masters of 24 bits": {"opt_level": "O5", "master_weights": "24bit"},
    "O5, 8-bit moments": {"opt_level": "O5", "moment_dtype": "8bit"},
    "O5, 7 bytes": {"opt_level": "O5", "master_weights": "24bit", "moment_dtype": "8bit"},
    "O5, released gradients": {"opt_level": "O5", "release_gradients": True},
}
CONTROLS = {
    "pure bfloat16": {"opt_level": "O5", "master_weights": False},
    "O3": {"opt_level": "O3"},
}


@dataclass(frozen=True)
class Data:
    """Inputs [N, ...] and targets [N] or [N, length], to train on and to test on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data and its recipe."""

    name: str
    about: str
    data: Callable[[], Data]
    model: Callable[[], nn.Module]
    batch_size: int
    steps: int
    learning_rate: float
    weight_decay: float = 0.01
    pretraining: Task | None = None  # its result, stored in bfloat16, is what training begins with
    controls: tuple[str, ...] = ()  # that must fail


@cache
def digits() -> Data:
    """Images [N, 1, 8, 8] of scikit-learn's digits."""
    found = load_digits()
    return Data((found.train_images, found.train_labels), (found.test_images, found.test_labels))


@cache
def turned_digits() -> Data:
    """The digits, turned by 90 degrees."""
    turned = [(images.rot90(dims=(2, 3)).contiguous(), labels) for images, labels in (digits().train, digits().test)]
    return Data(*turned)


@cache
def series() -> Data:
    """Series [N, 40] of MNIST-1D, as its package makes them from its seed."""
    from mnist1d.data import make_dataset

    made = {name: torch.as_tensor(value) for name, value in make_dataset().items() if name[0] in "xy"}
    return Data((made["x"].float(), made["y"]), (made["x_test"].float(), made["y_test"]))


@cache
def characters() -> Data:
    """Windows [N, 32] of Python's reference text in characters, and those one ahead."""
    topics, length = load_topics(), 32
    windows = topics.train_ids.unfold(0, length + 1, 1)
    return Data((windows[:, :-1], windows[:, 1:]), topics.test_windows(count=256, length=length))


class SeriesMLP(nn.Module):
    """Series [B, 40] -> logits [B, 10]: two hidden layers of 100, the second beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(40, 100), nn.Linear(100, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        return self.head(hidden + F.relu(self.second(hidden)))


def image_mlp() -> nn.Module:
    """Images [B, 1, 8, 8] -> logits [B, 10], with layer norms."""
    hidden = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


def small_gpt() -> nn.Module:
    """Character ids [B, 32] -> logits [B, 32, vocabulary]."""
    return GPT(len(load_topics().vocabulary), length=32, layers=2, width=32, heads=2)


TASKS = {
    task.name: task
    for task in (
        Task(
            name="digits",
            about="scikit-learn's digits; two convolutions with batch norm",
            data=digits,
            model=lambda: DigitsCNN(channels=4),
            batch_size=32,
            steps=200,
            learning_rate=5e-3,
            controls=("O3",),
        ),
        Task(
            name="mnist1d",
            about="MNIST-1D; an MLP, on fewer steps than its authors take for 68% (here 66%, at twice the test loss)",
            data=series,
            model=SeriesMLP,
            batch_size=200,
            steps=600,
            learning_rate=5e-3,
            weight_decay=1.0,
        ),
        Task(
            name="characters",
            about="Python's reference text, character by character; a GPT of two layers of width 32",
            data=characters,
            model=small_gpt,
            batch_size=8,
            steps=200,
            learning_rate=6e-3,
        ),
        Task(
            name="fine-tuning",
            about="an MLP with layer norms, trained on digits and stored in bfloat16, goes on with turned digits",
            data=turned_digits,
            model=image_mlp,
            batch_size=32,
            steps=300,
            learning_rate=1e-4,
            pretraining=Task("upright digits", "", digits, image_mlp, batch_size=32, steps=200, learning_rate=3e-3),
            controls=("pure bfloat16", "O3"),
        ),
    )
}


def train(task: Task, level: str, seed: int) -> dict[str, float]:
    """Loss and accuracy on the test data; the seed alone decides the first weights and the batches."""
    model = task.model()
    if task.pretraining is not None:
        model.bfloat16()
    model.load_state_dict(_first_weights(task, seed))
    try:
        _train(model, task, level, seed)
        inputs, targets = task.data().test
        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(part).float() for part in inputs.split(128)]).flatten(0, -2)
    finally:
        amp.close()
    right = logits.argmax(dim=-1) == targets.flatten()
    return {"loss": F.cross_entropy(logits, targets.flatten()).item(), "accuracy": right.float().mean().item()}


@lru_cache(maxsize=1)
def _first_weights(task: Task, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = (task.pretraining or task).model()
    if task.pretraining is not None:
        try:
            _train(model, task.pretraining, REFERENCE, seed)
        finally:
            amp.close()
        model.bfloat16()
    return model.state_dict()


def _train(model: nn.Module, task: Task, level: str, seed: int) -> None:
    arguments = {**LEVELS, **CONTROLS}[level]
    if task.pretraining is not None and level in ("O1", "O4"):
        arguments = {**arguments, "master_weights": True}  # which these levels ask for where weights arrive in half
    optimizer = torch.optim.AdamW(model.parameters(), task.learning_rate, weight_decay=task.weight_decay)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **arguments)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _factor(step, task.steps))
    order = torch.Generator().manual_seed(seed)
    inputs, targets = task.data().train
    for _ in range(task.steps):
        rows = torch.randint(len(inputs), (task.batch_size,), generator=order)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[rows]).flatten(0, -2), targets[rows].flatten())
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        scheduler.step()


def _factor(step: int, steps: int) -> float:
    """Factor of the learning rate: up over the first tenth of the steps, then down to 0."""
    return min(1.0, 10 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))
