"""Rounds tensors to formats of eight and four bits and back, on any device.

The OCP Microscaling Formats (MX) Specification v1.0 defines elements in section 5.3, and in section 6.3 blocks that
share a power of two.
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
"""The smallest power of two of E8M0, which holds 2^-127 to 2^127: MX v1.0, section 5.4.1."""


@dataclass(frozen=True)
class Element:
    """A floating-point format of MX v1.0, section 5.3; torch.finfo has the same numbers for E4M3 and E5M2.

    Attributes:
        name: name of the type in torch.
        mantissa_bits: number of stored bits of the mantissa.
        smallest_exponent: exponent of the smallest normal number.
        largest: the largest number.
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
    """An element, and the scales of blocks of elements.

    Attributes:
        element: the format that scaled values are rounded to.
        scales: returns, for the largest magnitudes of blocks, the factors to the element and back, float32.
        block: number of values that share a scale; None: all values of a tensor.
    """

    element: Element
    scales: Scales
    block: int | None = None


def quantize(tensor: Tensor, form: Format, dim: int) -> Tensor:
    """Return the values of a tensor as a format stores them: scaled, rounded, and scaled back. No host sync.

    Args:
        tensor: floating; float64 is rounded to float32 first.
        form: the format.
        dim: the dimension that is divided into blocks, from its start; the last block may be shorter.

    Returns:
        float32 of the same shape. A value that is not finite makes its block NaN, or the tensor if the tensor has a
        scale.
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
    """Round float32 values to the nearest number of a format, ties to even; larger values to its largest number.

    Within the range of a float8 type, torch's cast rounds the same way. Values that are not finite become NaN.
    """
    steps = _power_of_two(values_f32).clamp(min=2.0**element.smallest_exponent) * 2.0**-element.mantissa_bits
    return ((values_f32 / steps).round() * steps).clamp(-element.largest, element.largest)


def one_scale(largest: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Return scales, in float32, that map the largest magnitude to the largest number of the format.

    Transformer Engine's Float8CurrentScaling and torchao's float8 scale current values the same way.
    """
    scale = (element.largest / largest).clamp(max=_LARGEST_F32)
    return scale, 1.0 / scale


def powers_of_two(largest: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Return scales of MX v1.0, section 6.3: the largest power of two in a block over the largest one of the format.

    Scaled values beyond the largest number saturate: for E4M3, those from 448 to 512.
    """
    scale = (_power_of_two(largest) * 2.0 ** -math.floor(math.log2(element.largest))).clamp(min=_SMALLEST_SCALE)
    return 1.0 / scale, scale


def two_levels(largest: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Return scales of NVFP4: of blocks, in E4M3, times one of the tensor, in float32, which makes the largest 448.

    NVIDIA, Pretraining Large Language Models with NVFP4, https://arxiv.org/abs/2509.25149, appendix on quantization. A
    block whose scale is rounded to 0 becomes 0.
    """
    of_tensor = (E4M3.largest * element.largest / largest.amax()).clamp(max=_LARGEST_F32)
    of_block = rounded(largest / element.largest * of_tensor, E4M3)
    return (of_tensor / of_block).clamp(max=_LARGEST_F32), of_block / of_tensor


def _power_of_two(values_f32: Tensor) -> Tensor:
    """Return the largest power of two in each magnitude; 0 below 2^-126, and inf for a value that is not finite."""
    return (values_f32.view(torch.int32) & 0x7F800000).view(torch.float32)
