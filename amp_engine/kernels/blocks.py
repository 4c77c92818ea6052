"""Moments in 8 bits by blocks of 32 elements, in plain PyTorch; csrc/math/blocks.h has the format, and steps them.

The moment of a weight of n elements is one flat tensor of n codes, in the order of the weight's memory, and
ceil(n / 32) exponents. It is no value that torch's own classes could step; their steps fail on its shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CODES = torch.uint8
"""The type that holds the codes and the exponents."""

_BLOCK = 32
_LEAST = 23  # exponent up to which the largest magnitude of a block makes the block 0


class _Code(NamedTuple):
    bits: int
    of_root: bool

    @property
    def top(self) -> int:
        return 2**self.bits - 1


FIRST = _Code(7, of_root=False)
"""Of first moments and momentum buffers: with a sign."""

SECOND = _Code(8, of_root=True)
"""Of second moments: a code is of the root, and at least 1 in a block that is not 0."""


def size_in_blocks(n: int) -> int:
    """Return the number of bytes in which n elements are kept."""
    return n + (n + _BLOCK - 1) // _BLOCK


def is_in_blocks(value: Tensor, weight: Tensor) -> bool:
    """True if `value` is the moment of `weight` in blocks; torch may have cast its codes to floats, which is exact.

    Waits for the device if it has to look at floats.
    """
    if value.ndim != 1 or value.numel() != size_in_blocks(weight.numel()):
        return False
    return value.dtype is CODES or bool((value == value.to(CODES)).all())


def in_blocks(value_f32: Tensor, code: _Code, noise: Tensor | float = 0.5) -> Tensor:
    """Return a dense float32 tensor in blocks. No host sync.

    Args:
        value_f32: the moment.
        code: its kind.
        noise: numbers in [0, 1), float32, for each element in memory order; 0.5 rounds to the nearest.
    """
    n = value_f32.numel()
    flat = value_f32.new_zeros(-(-n // _BLOCK), _BLOCK)
    flat.view(-1)[:n] = _in_memory_order(value_f32.detach())
    flat = flat.sqrt() if code.of_root else flat
    if isinstance(noise, Tensor):
        noise = torch.nn.functional.pad(noise, (0, flat.numel() - n)).view_as(flat)
    largest = flat.abs().view(torch.int32).amax(1) if n else flat.new_zeros(0, dtype=torch.int32)
    exponents = largest.long() + (1 << (24 - code.bits)) >> 23  # see exponent_of in csrc/math/blocks.h
    is_finite = exponents < 255
    exponents = torch.where(is_finite, torch.where(exponents <= _LEAST, 0, exponents - (code.bits - 1)), 255)
    inverse = torch.where(is_finite & (exponents > 0), 254 - exponents << 23, 0).int().view(torch.float32)
    y = torch.addcmul(torch.as_tensor(noise, dtype=torch.float32), flat, inverse[:, None])
    codes = y.floor().nan_to_num(nan=0.0).int() & 0xFF
    return torch.cat([codes.view(-1)[:n].to(CODES), exponents.to(CODES)])


def from_blocks(value: Tensor, code: _Code, weight: Tensor) -> Tensor:
    """Return a moment in blocks as float32, laid out as its dense weight. No host sync."""
    n = weight.numel()
    held = value.to(CODES)
    scale = (held[n:].int() << 23).view(torch.float32).repeat_interleave(_BLOCK)[:n]
    codes = held[:n].clamp(min=1) if code.of_root else held[:n].view(torch.int8)
    x = codes.float() * scale
    wide = torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
    _in_memory_order(wide).copy_(x.square() if code.of_root else x)
    return wide


def _in_memory_order(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,))
