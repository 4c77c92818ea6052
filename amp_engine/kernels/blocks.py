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
_DROPPED = 19  # bits of a float32's fraction that a code lacks
_HALF = 0x800  # of 12 bits of noise: rounds to the nearest


class _Code(NamedTuple):
    is_signed: bool
    top: int
    offset: float
    least: float


SIGNED = _Code(True, 127, 2.0**-7, 0.0)
"""Of first moments and momentum buffers."""

UNSIGNED = _Code(False, 255, 2.0**-15, 2.0**-20)
"""Of second moments."""


def size_in_blocks(n: int) -> int:
    """Return the number of bytes in which n elements are kept."""
    return n + (n + _BLOCK - 1) // _BLOCK


def is_in_blocks(value: Tensor, weight: Tensor) -> bool:
    """True if `value` is the moment of `weight` in blocks; torch may have cast its codes to floats, which is exact.

    Waits for the device if it has to look at floats.
    """
    if value.ndim != 1 or value.numel() != size_in_blocks(weight.numel()) or value.shape == weight.shape:
        return False
    return value.dtype is CODES or bool((value == value.to(CODES)).all())


def in_blocks(value_f32: Tensor, code: _Code, noise: Tensor | int = _HALF) -> Tensor:
    """Return a dense float32 tensor in blocks. `noise`: 12 bits for each element in memory order. No host sync."""
    n = value_f32.numel()
    flat = value_f32.new_zeros(-(-n // _BLOCK) * _BLOCK)
    flat[:n] = _in_memory_order(value_f32.detach())
    magnitudes = flat.abs()
    carry = (1 << _DROPPED) + int(code.offset * 2**23)  # see exponent_of in csrc/math/blocks.h
    largest = magnitudes.view(torch.int32).view(-1, _BLOCK).amax(1) if n else flat.int()
    exponents = (largest.long() + carry >> 23).clamp(max=255).int()
    inverse = torch.where((exponents == 0) | (exponents == 255), 0, (254 - exponents) << 23)
    inverse = torch.where(exponents == 254, 0x00400000, inverse).view(torch.float32)
    y = magnitudes * inverse.repeat_interleave(_BLOCK) + code.offset
    added = (noise << (_DROPPED - 12)) | 1 << (_DROPPED - 13)
    if isinstance(added, Tensor):
        added = torch.nn.functional.pad(added, (0, flat.numel() - n))
    place = ((y.view(torch.int32).long() & 0xFFFFFFFF) + added >> _DROPPED) - (_bits(code.offset) >> _DROPPED)
    codes = place.clamp(max=code.top)
    if code.is_signed:
        codes = codes | (flat.view(torch.int32) < 0).long() << 7
    return torch.cat([codes[:n].to(CODES), exponents.to(CODES)])


def from_blocks(value: Tensor, code: _Code, weight: Tensor) -> Tensor:
    """Return a moment in blocks as float32, laid out as its dense weight. No host sync."""
    n = weight.numel()
    bits = value.to(CODES).int()
    scale = (bits[n:] << 23).view(torch.float32).repeat_interleave(_BLOCK)[:n]
    y = (((bits[:n] & code.top) << _DROPPED) + _bits(code.offset)).view(torch.float32) - code.offset
    magnitude = y.clamp(min=code.least) * scale
    wide = torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
    _in_memory_order(wide).copy_(torch.where(bits[:n] > code.top, -magnitude, magnitude))
    return wide


def _in_memory_order(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,))


def _bits(x: float) -> int:
    return int(torch.tensor(x).view(torch.int32))
