"""Float32 weights as a bfloat16 and a remainder, in plain PyTorch; csrc/math/halves.h does the same in a step.

A float32 is kept as the bfloat16 that it rounds to, ties to even, and the lower half of its bits. The two cannot hold
all values: of the 65,537 values that round to an even bfloat16, two have the same lower half. So a tie below an even
bfloat16 is first moved up by one unit in the last place of float32. This changes 32,640 of the 4.28e9 finite values;
all others stay exact.

A master of 24 bits is the bfloat16 that it rounds to and the upper 8 bits of the remainder, and no tie between two
bfloat16. A step rounds to 24 bits by chance, as `split24` does, `remainder24` to the nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

REMAINDER = torch.int16
"""The type that holds the bits of lower halves."""

REMAINDER24 = torch.uint8
"""The type that holds the remainders of masters of 24 bits."""

REMAINDERS = (REMAINDER, REMAINDER24)

_HALF = 0x8000
_NAN = 0x7FC0


def split(value_f32: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bfloat16, remainder), of the shape and strides of a float32 tensor. NaNs lose payloads. No host sync."""
    bits = value_f32.detach().view(torch.int32)
    bits = bits + ((bits & 0x1FFFF) == 0x18000).int()
    low = bits & 0xFFFF
    high = (bits >> 16) + (low > _HALF).int()
    nan = value_f32.isnan()
    return _short(torch.where(nan, _NAN, high)).view(torch.bfloat16), _short(torch.where(nan, 0, low))


def remainder24(value_f32: Tensor, rounded: Tensor) -> Tensor:
    """Return the 8 bits with which `rounded`, the bfloat16 of `value_f32`, is nearest to it. No host sync."""
    high = rounded.detach().view(torch.int16).int()
    units = value_f32.detach().view(torch.int32) - (high << 16) + 0x80 >> 8
    return torch.where(value_f32.isnan(), 0, units.clamp(-0x7F, 0x7F) & 0xFF).to(REMAINDER24)


def split24(value_f32: Tensor, step: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return (bfloat16, 8 bits) of float32 elements, rounded by chance as the kernels do. No host sync.

    Args:
        value_f32: shape [n], elements in the order of memory. NaNs lose payloads.
        step: the number of the step, from 1.
        first: the place of the first element in its tensor.
    """
    given = value_f32.detach()
    of_step = _mixed(torch.full((), step, dtype=torch.int32, device=given.device))
    places = torch.arange(first, first + given.numel(), device=given.device).int()
    noise = _mixed(places + of_step) >> 24 & 0xFF
    bits = given.view(torch.int32) + noise
    bits += ((bits & 0xFF00) == 0x8000).int() * ((noise & 2) * 0x100 - 0x100)
    low = bits >> 8 & 0xFF
    high = (bits >> 16) + (low > 0x80).int()
    nan = given.isnan()
    return _short(torch.where(nan, _NAN, high)).view(torch.bfloat16), torch.where(nan, 0, low).to(REMAINDER24)


def joined(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 tensor of a bfloat16 and a remainder of either type. No host sync.

    If `rounded` was written since `split`, the old remainder changes the result by less than half of bfloat16's unit.
    """
    high = _long(rounded.detach().view(torch.int16))
    low = remainder.int() << 8 if remainder.dtype is REMAINDER24 else _long(remainder)
    was_rounded_up = low > _HALF
    is_lost = was_rounded_up & ((high & 0x7FFF) == 0)  # `split` rounds nothing up to 0
    low = torch.where(is_lost, 0, low)
    return (((high - (was_rounded_up & ~is_lost).int()) << 16) | low).view(torch.float32)


def _mixed(x: Tensor) -> Tensor:
    """Hash int32 bits, as `mixed` in csrc/math/halves.h does."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def _short(bits: Tensor) -> Tensor:
    """Return the lower 16 bits of an integer as int16."""
    return ((bits + _HALF & 0xFFFF) - _HALF).to(torch.int16)


def _long(bits: Tensor) -> Tensor:
    """Return the bits of an int16 as int32."""
    return bits.int() & 0xFFFF
