"""Formats of eight and four bits: tensors rounded to them and back, on any device.

Elements, and blocks that share a power of two: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 and 6.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGEST_F32 = torch.finfo(torch.float32).max
_SMALLEST_SCALE = 2.0**-127
"""Of the powers of two that E8M0 holds, 2^-127 to 2^127: MX v1.0, section 5.4.1."""


@dataclass(frozen=True)
class Element:
    """A floating format, by what MX v1.0, section 5.3, says of it; that of E4M3 and E5M2 is torch.finfo's as well.

    Attributes:
        name: as torch names the type.
        mantissa_bits: that are stored.
        smallest_exponent: of a number with all of these bits; below it numbers are subnormal.
        largest: number.
    """

    name: str
    mantissa_bits: int
    smallest_exponent: int
    largest: float

    @property
    def roundoff(self) -> float:
        """The unit roundoff: 2**-4 for E4M3, 2**-3 for E5M2, 2**-2 for E2M1."""
        return 2.0 ** -(self.mantissa_bits + 1)


E4M3 = Element("float8_e4m3fn", 3, -6, 448.0)
E5M2 = Element("float8_e5m2", 2, -14, 57344.0)
E2M1 = Element("float4_e2m1fn", 1, 0, 6.0)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives

Scales = Callable[[Tensor, Element], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Format:
    """An element, and the scales of blocks of them.

    Attributes:
        element: that scaled values are rounded to.
        scales: gives the factors to it and back, float32, for the largest magnitudes of blocks.
        block: how many values share a scale; None: all of a tensor.
    """

    element: Element
    scales: Scales
    block: int | None = None


def quantize(tensor: Tensor, form: Format, dim: int) -> Tensor:
    """The values of a tensor that is stored in a format: scaled, rounded, and scaled back.

    Args:
        tensor: floating; float64 is rounded to float32 first.
        form: that it is stored in.
        dim: along which blocks lie, from its begin; the last one may be shorter.

    Returns:
        float32 of the same shape. A block with a value that is not finite, or a tensor where blocks share a scale of
        the tensor, is NaN. No host sync.
    """
    values = tensor.float()
    if values.numel() == 0:
        return values
    if form.block is None:
        to_element, back = form.scales(values.abs().amax(), form.element)
        return rounded(values * to_element, form.element) * back
    length = values.shape[dim]
    blocks = F.pad(values.movedim(dim, -1), (0, -length % form.block)).unflatten(-1, (-1, form.block))
    to_element, back = form.scales(blocks.abs().amax(-1, keepdim=True), form.element)
    found = rounded(blocks * to_element, form.element) * back
    return found.flatten(-2)[..., :length].movedim(-1, dim)


def rounded(values_f32: Tensor, element: Element) -> Tensor:
    """Round float32 values to the nearest number of a format, ties to even, and beyond its largest number to that.

    As torch casts to float8 types do within their range. What is not finite becomes NaN.
    """
    steps = _power_of_two(values_f32).clamp(min=2.0**element.smallest_exponent) * 2.0**-element.mantissa_bits
    return ((values_f32 / steps).round() * steps).clamp(-element.largest, element.largest)


def one_scale(largest: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Scales that make the largest magnitude the largest number of the format, in float32.

    As Transformer Engine's Float8CurrentScaling and torchao's float8 do, of the values of the moment.
    """
    scale = (element.largest / largest).clamp(max=_LARGEST_F32)
    return scale, 1.0 / scale


def powers_of_two(largest: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Scales of MX v1.0, section 6.3: the largest power of two in a block over the largest one of the format.

    What then is beyond the largest number, up to 512 of E4M3's 448, saturates.
    """
    scale = (_power_of_two(largest) * 2.0 ** -math.floor(math.log2(element.largest))).clamp(min=_SMALLEST_SCALE)
    return 1.0 / scale, scale


def two_levels(largest: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Scales of NVFP4: of a block in E4M3, times one of the tensor in float32, which makes the largest of these 448.

    NVIDIA, Pretraining Large Language Models with NVFP4, https://arxiv.org/abs/2509.25149, appendix on quantization. A
    block whose scale is rounded to 0 becomes 0.
    """
    of_tensor = (E4M3.largest * element.largest / largest.amax()).clamp(max=_LARGEST_F32)
    of_block = rounded(largest / element.largest * of_tensor, E4M3)
    return (of_tensor / of_block).clamp(max=_LARGEST_F32), of_block / of_tensor


def _power_of_two(values_f32: Tensor) -> Tensor:
    """The largest power of two in each magnitude; 0 below 2^-126, and inf for what is not finite."""
    return (values_f32.view(torch.int32) & 0x7F800000).view(torch.float32)
