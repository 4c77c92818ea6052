"""Tensor lists for the tests of kernels: every type, odd sizes, odd addresses, guarded on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, product

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 7, 8, 31, 4096, 32767, 32768, 32769, 65537)
GUARD = 16
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(BITS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def same_values(a: Tensor, b: Tensor) -> bool:
    """True if values are equal to the bit, up to the payload of NaNs."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and same_bits(a.nan_to_num(0.5), b.nan_to_num(0.5))


def copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.detach().clone() for t in tensors]


@dataclass
class Arena:
    """Makes tensors that lie at odd addresses inside of larger buffers, and notices writes beside them."""

    seed: int = 0
    buffers: list[tuple[Tensor, Tensor, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.offsets = cycle(range(8))

    def randn(self, n: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return self.place((torch.randn(n, generator=self.generator) * scale).to(dtype))

    def zeros(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.place(torch.zeros(n, dtype=dtype))

    def place(self, values: Tensor) -> Tensor:
        """A copy of `values` (1-d), 0 to 7 elements away from an aligned address."""
        n, offset = values.numel(), GUARD + next(self.offsets)
        buffer = torch.full((n + 2 * GUARD + 8,), 77.0).to(values.dtype)
        buffer[offset : offset + n] = values
        self.buffers.append((buffer, buffer.clone(), offset, n))
        return buffer[offset : offset + n]

    def is_intact(self) -> bool:
        return all(
            same_bits(buffer[:offset], before[:offset]) and same_bits(buffer[offset + n :], before[offset + n :])
            for buffer, before, offset, n in self.buffers
        )


@dataclass
class Rows:
    """The rows of one step, in every combination of gradient, weight and copy type."""

    grads: list[Tensor | None]
    params: list[Tensor]
    copies: list[Tensor | None]
    first: list[Tensor]
    second: list[Tensor]
    steps: Tensor
    norms: Tensor

    def tensors(self) -> list[Tensor]:
        lists = [self.params, self.copies, self.first, self.second, [self.steps, self.norms]]
        return [t for tensors in lists for t in tensors if t is not None]


def rows(arena: Arena, scale: float = 1.0, sizes: Sequence[int] = SIZES) -> Rows:
    """36 combinations over `sizes`; gradients are `scale` times too large; two earlier steps have left some state."""
    combinations = list(product(FLOATS, FLOATS, (None, *FLOATS)))
    # 7 and 36 have no common divisor: neighbours get unlike types.
    combinations = [combinations[7 * i % 36] for i in range(36)]
    ns = [n for n, _ in zip(cycle(sizes), combinations, strict=False)]
    return Rows(
        grads=[arena.randn(n, g, 0.1 * scale) for n, (g, _, _) in zip(ns, combinations, strict=True)],
        params=[arena.randn(n, w) for n, (_, w, _) in zip(ns, combinations, strict=True)],
        copies=[None if c is None else arena.zeros(n, c) for n, (_, _, c) in zip(ns, combinations, strict=True)],
        first=[arena.place(arena.randn(n).abs() * 0.1) for n in ns],
        second=[arena.place(arena.randn(n).square() * 0.01) for n in ns],
        steps=torch.full((36,), 2.0),
        norms=torch.full((36,), 0.5),
    )
