"""The tasks of the demo: each has a model, its batches, its held-out metric, its levels."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo.data import BatchFn, load_digits, load_topics
from examples.demo.models import GPT, DigitsCNN

HALF_LEVELS = ("O1", "O2", "O3")
SMALL, PURE = "O5 small", "bfloat16"
BFLOAT16_LEVELS = ("O4", "O5", SMALL, PURE)
# The arguments of `amp.initialize` for rows that are no plain level.
OPTIONS: dict[str, dict[str, Any]] = {
    SMALL: {"opt_level": "O5", "master_weights": "split", "moment_dtype": torch.bfloat16},
    PURE: {"opt_level": "O5", "master_weights": False, "keep_batchnorm_fp32": False},
}


@dataclass(frozen=True)
class Layer:
    """The layer that takes most of a task's time, measured in each type before the training."""

    name: str  # of its operation, in the plural
    build: Callable[[], nn.Module]
    rows: int  # of its input in a batch
    row_shape: tuple[int, ...]
    per_step: int  # so many layers, forward and backward, take most of a step


@dataclass(frozen=True)
class Task:
    """One model on one data set; the seed makes every level start from the same weights."""

    name: str
    metric: str
    levels: tuple[str, ...]
    steps: int
    learning_rate: float
    build_model: Callable[[], nn.Module]
    batch: BatchFn
    evaluate: Callable[[nn.Module], float]
    evaluation_steps: float  # its time, as a number of training steps
    layer: Layer
    seed: int = 0


def digits_cnn() -> Task:
    """Batch norm and convolutions; the metric is the accuracy on 599 images."""
    digits = load_digits()

    def accuracy(model: nn.Module) -> float:
        device = next(model.parameters()).device
        with torch.no_grad():
            logits = model(digits.test_images.to(device))
        return (logits.argmax(dim=-1).cpu() == digits.test_labels).float().mean().item()

    return Task(
        name="digits-cnn",
        metric="accuracy",
        levels=("O0", *HALF_LEVELS, *BFLOAT16_LEVELS),
        steps=150,
        learning_rate=5e-3,
        build_model=DigitsCNN,
        batch=lambda step: digits.batch(step, batch_size=32),
        evaluate=accuracy,
        evaluation_steps=7,
        layer=Layer("convolutions", lambda: nn.Conv2d(16, 32, 3, padding=1), 32, (16, 8, 8), per_step=1),
    )


def topics_gpt() -> Task:
    """Attention and layer norm, at a learning rate of fine-tunes; the metric is bits per character of held-out text."""
    levels = ("O0", *HALF_LEVELS, *BFLOAT16_LEVELS)
    return _topics("topics-gpt", levels, steps=300, learning_rate=2e-4, width=64, batch_size=12)


def topics_gpt_wide() -> Task:
    """A GPT wide enough for the matrix units of a CPU to matter: FP32 against the bfloat16 levels."""
    levels = ("O0", *BFLOAT16_LEVELS)
    return _topics("topics-gpt-wide", levels, steps=40, learning_rate=1e-3, width=512, batch_size=32)


def all_tasks() -> list[Task]:
    """The rows of the table, in its order."""
    return [digits_cnn(), topics_gpt(), topics_gpt_wide()]


def _topics(
    name: str,
    levels: tuple[str, ...],
    steps: int,
    learning_rate: float,
    width: int,
    batch_size: int,
) -> Task:
    topics, length, layers = load_topics(), 32, 2

    def bits_per_character(model: nn.Module) -> float:
        device = next(model.parameters()).device
        inputs, targets = topics.test_windows(count=256, length=length)
        with torch.no_grad():
            losses = [
                mean_cross_entropy(model(x.to(device)), y.to(device)).item()
                for x, y in zip(inputs.split(16), targets.split(16), strict=True)
            ]
        return sum(losses) / len(losses) / math.log(2)

    return Task(
        name=name,
        metric="bits/char",
        levels=levels,
        steps=steps,
        learning_rate=learning_rate,
        build_model=lambda: GPT(len(topics.vocabulary), length, layers, width=width, heads=4),
        batch=lambda step: topics.batch(step, batch_size, length),
        evaluate=bits_per_character,
        evaluation_steps=256 / batch_size / 3,
        layer=Layer(
            "products", lambda: nn.Linear(width, 4 * width), batch_size * length, (width,), per_step=3 * layers
        ),  # a block has 12 * width**2 weights in its products
    )


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over every position; logits [..., classes], targets [...]."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
