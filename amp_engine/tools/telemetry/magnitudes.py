"""Counts the magnitudes of tensors' values by powers of two on their device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_engine.ground.distributed import local_of
from amp_engine.stepping.arithmetic import reals

# A float32 is 2^(field - 127) * 1.mantissa; its field is 0 for 0 and values below 2^-126, and 255 for inf and NaN.
_FIELDS = 256
_BIAS = 127
_ZEROS = _FIELDS  # one more place, for values that are 0

LOWEST = -_BIAS
"""The exponent under which values below 2^-126 are counted."""


@dataclass(frozen=True)
class Limits:
    """The range of a floating type, as exponents of two.

    Attributes:
        largest: exponent of the largest power of two; float16: 15, since its largest number is 65504.
        smallest_normal: exponent below which numbers have fewer bits; float16: -14.
        smallest: exponent of the smallest number; float16: -24. Half of that number rounds to even, so to 0.
    """

    largest: int
    smallest_normal: int
    smallest: int

    @classmethod
    def of(cls, dtype: torch.dtype) -> Limits:
        """The limits of `torch.finfo(dtype)`."""
        info = torch.finfo(dtype)
        normal = math.frexp(info.tiny)[1] - 1
        return cls(math.frexp(info.max)[1] - 1, normal, normal + round(math.log2(info.eps)))


@dataclass(frozen=True)
class Magnitudes:
    """The number of values of each power of two.

    Attributes:
        counts: (e, n), ascending: n values with 2^e <= |x| < 2^(e+1). Values below 2^-126 are under `LOWEST`.
        zeros: number of zeros.
        nonfinite: number of inf and NaN.
    """

    counts: tuple[tuple[int, int], ...] = ()
    zeros: int = 0
    nonfinite: int = 0

    @property
    def total(self) -> int:
        """The number of all values."""
        return self.nonzero + self.zeros + self.nonfinite

    @property
    def nonzero(self) -> int:
        """The number of values that are finite and not 0."""
        return sum(n for _, n in self.counts)

    @property
    def largest(self) -> int | None:
        """The exponent of the largest finite value; None without a nonzero one."""
        return self.counts[-1][0] if self.counts else None

    def lost(self, dtype: torch.dtype, scale: float = 1.0) -> float:
        """Share, 0 to 1, of the nonzero values that become 0 in `dtype` after multiplication by `scale`.

        Values below half of the smallest number round to 0: those with e + log2(scale) < smallest - 1. The
        scale is rounded down to a power of two, since values are counted by powers of two.
        """
        below = Limits.of(dtype).smallest - math.frexp(scale)[1]  # frexp gives log2(scale) + 1
        return sum(n for e, n in self.counts if e < below) / max(1, self.nonzero)

    def __add__(self, other: Magnitudes) -> Magnitudes:
        counts = dict(self.counts)
        for e, n in other.counts:
            counts[e] = counts.get(e, 0) + n
        return Magnitudes(tuple(sorted(counts.items())), self.zeros + other.zeros, self.nonfinite + other.nonfinite)


class MagnitudeCounter:
    """Counts values by powers of two on their device; only `read` waits."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def add(self, tensor: Tensor, inv_scale: Tensor | float = 1.0) -> None:
        """Count the values of a tensor, complex ones as pairs, multiplied by `inv_scale`; of a DTensor this rank's.

        Takes about 13 bytes of memory per value temporarily. No host sync.
        """
        values = local_of(tensor.detach())
        values = values.coalesce().values() if values.is_sparse else values
        counted = _counted(reals(values).float() * inv_scale)
        so_far = self._counts.get(counted.device)
        self._counts[counted.device] = counted if so_far is None else so_far.add_(counted)

    def read(self) -> Magnitudes:
        """The counts so far. Waits for the device."""
        sums = [0] * (_FIELDS + 1)
        for counted in self._counts.values():
            sums = [a + b for a, b in zip(sums, counted.tolist(), strict=True)]
        counts = tuple((field - _BIAS, n) for field, n in enumerate(sums[: _FIELDS - 1]) if n)
        return Magnitudes(counts, sums[_ZEROS], sums[_FIELDS - 1])


def _counted(values_f32: Tensor) -> Tensor:
    """Count the values with each exponent field, and the zeros last: int64, shape [257], on their device."""
    fields = values_f32.abs().view(torch.int32).bitwise_right_shift(23).long()
    fields = fields.masked_fill(values_f32 == 0, _ZEROS).flatten()
    if fields.is_cpu:
        return torch.bincount(fields, minlength=_FIELDS + 1)
    # bincount waits for the GPU to know the number of bins; histc counts in float32, so only up to 2^24.
    return torch.zeros(_FIELDS + 1, dtype=torch.int64, device=fields.device).scatter_add_(
        0, fields, torch.ones_like(fields)
    )
