"""The distance of a tensor of one run from the same tensor of another run.

Relative errors in norm, ||a - b|| / ||b||, with the 2-norm over all elements: N. J. Higham, Accuracy and Stability of
Numerical Algorithms, 2nd edition, SIAM 2002, section 6.2 (norms) and 1.2 (relative error). Differences are taken in
float32 (float64 if one of the tensors is), sums of squares in float64, or in float32 on a device without float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_engine.stepping.arithmetic import values


@dataclass(frozen=True)
class Distance:
    """The distance of a from b.

    Attributes:
        difference: ||a - b||; infinity if an element that is not finite in a or b differs from the other's.
        norm: ||b||.
    """

    difference: float
    norm: float

    @property
    def relative(self) -> float:
        """||a - b|| / ||b||; 0 if a and b are equal; 1 if only b is 0, because then no element of a is right."""
        if self.difference == 0.0:
            return 0.0
        if self.norm == 0.0:
            return math.inf if math.isinf(self.difference) else 1.0
        return self.difference / self.norm

    def __add__(self, other: Distance) -> Distance:
        """The distance of two pairs of tensors as if each pair were concatenated."""
        return Distance(math.hypot(self.difference, other.difference), math.hypot(self.norm, other.norm))


def distance(a: Tensor, b: Tensor, factor: float = 1.0) -> Distance:
    """The distance of `factor * a` from `b`, of the same shape. Waits for the device.

    Elements count as equal if both are NaN, or the same infinity, or masks: at most half of the lowest finite number
    of their type.
    """
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    low_a, low_b = (torch.finfo(one.dtype).min / 2 for one in (a, b))
    a, b = (one.detach() if one.layout is torch.strided else one.detach().to_dense() for one in (a, b))
    a, b = a.to(wide), b.to(device=a.device, dtype=wide)
    if factor != 1.0:
        a, low_a = a * factor, low_a * factor
    equal = ((a <= low_a) & (b <= low_b)) | (a == b) | (a.isnan() & b.isnan())
    if bool((~equal & ~(a.isfinite() & b.isfinite())).any()):
        return Distance(math.inf, norm(b))
    return Distance(norm(torch.where(equal, 0.0, a - b)), norm(torch.where(equal & (b <= low_b), 0.0, b)))


def norm(tensor: Tensor) -> float:
    """The 2-norm of the finite elements. Waits for the device."""
    tensor = torch.where(tensor.isfinite(), tensor, 0.0)
    sums = torch.float32 if tensor.device.type == "mps" else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=sums))


def stored(tensor: Tensor) -> Tensor:
    """The elements that a sparse tensor stores, with another number of dimensions; a dense tensor itself.

    If a sparse tensor stores several values for one element, they are added up, as in any use of the tensor.
    """
    if tensor.layout is torch.strided:
        return tensor
    return values(tensor) if tensor.is_sparse else tensor.values()


def roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff: half of the distance from 1 to the next number of the type. Higham, as above, section 2.1."""
    return torch.finfo(dtype).eps / 2


def growth(error: float, error_in: float, roundoff: float) -> float:
    """The factor by which an operation made the relative error of its inputs larger: error / max(error_in, u).

    Estimates the condition number from one input, whose error counts as at least one rounding: Higham, as above,
    section 1.6, "forward error <= condition number * backward error". Infinity if only its result has an infinite
    error, 1 if an input had one already.
    """
    if math.isinf(error):
        return 1.0 if math.isinf(error_in) else math.inf
    return 0.0 if math.isinf(error_in) else error / max(error_in, roundoff)
