"""Shared by the programs: their arguments, their text, and the record that the driver reads."""

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from apex import amp
from torch import Tensor, nn
from torch.utils.data import TensorDataset

STEPS = 32
LONG = 64  # steps of one_line_*.py
SAVED_AT = 16
OVERFLOWS_AT = 24  # the step of a variant "later" that is skipped
CHARACTERS = 128
EPS = 1e-4  # of AdamW: the default, 1e-8, is 0 in float16, and O3 divides by it

# Of the variant "ranks", which torchrun starts.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def arguments(description: str) -> argparse.Namespace:
    """`--level`, `--out`, `--resume` and `--variant`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--level", default="O1")
    parser.add_argument("--out", type=Path, default=Path("."), help="for checkpoints; default: %(default)s")
    parser.add_argument("--resume", type=Path, help="train on from the checkpoint in this folder")
    parser.add_argument("--variant", default="", help="another way through the client")
    return parser.parse_args()


def text_windows(count: int, length: int) -> Tensor:
    """Windows of the text behind Python's `help("topics")`, as ASCII codes: int64 [count, length]."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    ids = torch.tensor(list(text))
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(len(ids) - length, (count, 1), generator=generator)
    return ids[start + torch.arange(length)]


def digit_classifier() -> nn.Module:
    """A small convolutional classifier of scikit-learn's digits: [n, 1, 8, 8] to [n, 10], the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def in_bfloat16(model: nn.Module, level: str) -> nn.Module:
    """The model in bfloat16; at O0 and O4 the same weights in FP32."""
    model.to(torch.bfloat16)
    return model.float() if level in ("O0", "O4") else model


class NextCharacter(nn.Module):
    """A character model that came in bfloat16; at O0 and O4 the same weights in FP32. [n, CONTEXT] to logits.

    Beside its weights, steps of RATE are too small for bfloat16.
    """

    CONTEXT = 8
    RATE = 3e-4

    def __init__(self, level: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CHARACTERS, 128)
        self.norm = nn.LayerNorm(128 * self.CONTEXT)
        self.head = nn.Linear(128 * self.CONTEXT, CHARACTERS)
        nn.init.normal_(self.head.weight, std=0.12)
        in_bfloat16(self, level)

    def forward(self, context: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(context).flatten(1)))

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.RATE)


def next_characters(batches: int, size: int = 32, first: int = 0) -> TensorDataset:
    """Contexts and the characters behind them, from the batch `first` on."""
    windows = text_windows(batches * size, NextCharacter.CONTEXT + 1)[first * size :]
    return TensorDataset(windows[:, :-1], windows[:, -1])


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """In FP32, also of logits in bfloat16."""
    return F.cross_entropy(logits.float(), targets)


def overflow(model: nn.Module, level: str) -> None:
    """Make all gradients infinite, so that the step is skipped; at O0, which would take it, leave none."""
    for param in model.parameters():
        if level == "O0":
            param.grad = None
        elif param.grad is not None:
            param.grad.fill_(float("inf"))


def lower_scale() -> None:
    """Write a loss scale of 2**13, as scripts do, so that a scaler that was restored differs from a new one."""
    for scaler in amp._amp_state.loss_scalers:
        if scaler.dynamic:
            scaler._loss_scale = 2.0**13


def scaler_state() -> dict[str, float]:
    """Scale and count of clean steps, out of `amp.state_dict()`."""
    return dict(amp.state_dict(format="apex")["loss_scaler0"])


def check_ranks_agree(tensors: Iterable[Tensor]) -> None:
    """Raise AssertionError where a tensor is not that of rank 0, bit for bit."""
    if WORLD_SIZE == 1:
        return
    for tensor in tensors:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor), f"rank {RANK} has other weights than rank 0"


def report(**record: object) -> None:
    """Print the record as the last line, at rank 0. Ranks end here."""
    if RANK == 0:
        print(json.dumps(record), flush=True)
    if WORLD_SIZE > 1:
        os._exit(0)  # with torch 2.13 a thread of Gloo and the interpreter's end may wait for each other forever
