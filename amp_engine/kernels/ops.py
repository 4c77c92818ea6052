"""The list operations as callers know them, and their operators (library.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_engine.kernels.backend import Backend, Checks
from amp_engine.kernels.choice import backend_for
from amp_engine.kernels.library import call, define, fake_nothing

_CPU = torch.device("cpu")


def check(tensors: Sequence[Tensor]) -> Checks:
    """Look at every element once: non-finite or not, sum of squares and largest magnitude of each tensor.

    Args:
        tensors: n dense tensors of float16, bfloat16 or float32, mixed freely, on one device.

    Returns:
        See `Checks`. The largest magnitude decides: a finite tensor whose squares overflow is not reported.

    Raises AmpValueError for other lists, as all operations do before anything is written. No host sync.
    """
    return Checks(*call("check", _check, tensors, tensors))


def l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """2-norm over all of `tensors`, and of each of them: float32, shapes [] and [n]. No host sync."""
    return call("l2norm", _l2norm, tensors, tensors)


def unscaled(tensors: Sequence[Tensor], inv_scale: Tensor) -> list[Tensor]:
    """`[t.float() * inv_scale for t in tensors]`: float32, shapes and strides as given. No host sync.

    Args:
        inv_scale: float32, shape [], on the device of `tensors`.
    """
    return call("unscaled", _unscaled, tensors, tensors, inv_scale)


def unscale_(tensors: Sequence[Tensor], inv_scale: Tensor) -> Checks:
    """`t *= inv_scale` for each t, computed in float32 and rounded once to the type of t. No host sync.

    Args:
        inv_scale: float32, shape [], on the device of `tensors`.

    Returns:
        What was found before.
    """
    return Checks(*call("unscale_", _unscale_, tensors, tensors, inv_scale))


def scale_(outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: Tensor) -> Checks:
    """`output[...] = input * factor` pairwise, in float32, rounded once to the type of each output. No host sync.

    Args:
        outputs: of the shapes and strides of `inputs`, each possibly the input itself.
        factor: float32, shape [], on the device of `inputs`.

    Returns:
        What was found in `inputs`.
    """
    return Checks(*call("scale_", _scale_, inputs, outputs, inputs, factor))


def axpby_(
    outputs: Sequence[Tensor], xs: Sequence[Tensor], ys: Sequence[Tensor], a: Tensor | None, b: Tensor | None
) -> Checks:
    """`output[...] = fma(a, x, b * y)` triple by triple, in float32, rounded once to each output's type. No host sync.

    Args:
        outputs, xs, ys: of equal shapes and strides; an output may be its x or its y.
        a, b: float32, shape [], on the device of `xs`; None is 1.

    Returns:
        What was found in `xs`.
    """
    return Checks(*call("axpby_", _axpby_, xs, outputs, xs, ys, a, b))


def cast_copy_(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """`output[...] = input` pairwise, rounded to nearest even into the type of each output. No host sync."""
    call("cast_copy_", _cast_copy_, inputs, outputs, inputs)


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis_tracker: Tensor | None = None,
    hysteresis: int = 1,
    dynamic: bool = True,
    inv_scale_used: Tensor | None = None,
    found_inf_used: Tensor | None = None,
) -> None:
    """Adjust a dynamic loss scale after one backward, in place; `reference_lists.update_scale_` says how. No host sync.

    Args:
        scale: float32, shape [].
        growth_tracker: int32, shape []: clean backwards since the scale last moved.
        found_inf: float32, shape []. Tested `!= 0`, since it may be a sum over devices or ranks.
        hysteresis_tracker: int32, shape []: overflows that are still let pass. None: the first one counts.
        dynamic: False: the scale stays, and the count runs on.
        inv_scale_used: float32, shape []; receives 1 / scale of before.
        found_inf_used: float32, shape []; takes `found_inf` over, which is then 0.
    """
    call(
        "update_scale_",
        _update_scale_,
        [scale],
        scale,
        growth_tracker,
        found_inf,
        hysteresis_tracker,
        inv_scale_used,
        found_inf_used,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        min_scale,
        max_scale,
        dynamic,
    )


def _check(tensors: Sequence[Tensor]) -> Checks:
    return _backend_of(tensors).check(tensors)


def _l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return _backend_of(tensors).l2norm(tensors)


def _unscaled(tensors: Sequence[Tensor], inv_scale: Tensor) -> list[Tensor]:
    return _backend_of(tensors).unscaled(tensors, inv_scale)


def _unscale_(tensors: Sequence[Tensor], inv_scale: Tensor) -> Checks:
    return _backend_of(tensors).unscale_(tensors, inv_scale)


def _scale_(outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: Tensor) -> Checks:
    return _backend_of(inputs).scale_(outputs, inputs, factor)


def _axpby_(
    outputs: Sequence[Tensor], xs: Sequence[Tensor], ys: Sequence[Tensor], a: Tensor | None, b: Tensor | None
) -> Checks:
    return _backend_of(xs).axpby_(outputs, xs, ys, a, b)


def _cast_copy_(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    _backend_of(inputs).cast_copy_(outputs, inputs)


def _update_scale_(*args: Any) -> None:
    backend_for(args[0].device).update_scale_(*args)


def _backend_of(tensors: Sequence[Tensor]) -> Backend:
    return backend_for(tensors[0].device if tensors else _CPU)


def _fake_checks(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    n, device = len(tensors), tensors[0].device if tensors else None
    return (
        torch.empty(n, dtype=torch.bool, device=device),
        torch.empty(n, dtype=torch.float64, device=device),
        torch.empty(n, dtype=torch.float32, device=device),
    )


def _fake_l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    device = tensors[0].device if tensors else None
    return torch.empty((), device=device), torch.empty(len(tensors), device=device)


_CHECKS = "(Tensor, Tensor, Tensor)"
define("check", _check, f"(Tensor[] tensors) -> {_CHECKS}", _fake_checks)
define("l2norm", _l2norm, "(Tensor[] tensors) -> (Tensor, Tensor)", _fake_l2norm)
define(
    "unscaled",
    _unscaled,
    "(Tensor[] tensors, Tensor inv_scale) -> Tensor[]",
    lambda tensors, inv_scale: [torch.empty_like(t, dtype=torch.float32) for t in tensors],
)
define(
    "unscale_",
    _unscale_,
    f"(Tensor(a!)[] tensors, Tensor inv_scale) -> {_CHECKS}",
    lambda tensors, inv_scale: _fake_checks(tensors),
)
define(
    "scale_",
    _scale_,
    f"(Tensor(a!)[] outputs, Tensor[] inputs, Tensor factor) -> {_CHECKS}",
    lambda outputs, inputs, factor: _fake_checks(inputs),
)
define(
    "axpby_",
    _axpby_,
    f"(Tensor(a!)[] outputs, Tensor[] xs, Tensor[] ys, Tensor? a, Tensor? b) -> {_CHECKS}",
    lambda outputs, xs, ys, a, b: _fake_checks(xs),
)
define("cast_copy_", _cast_copy_, "(Tensor(a!)[] outputs, Tensor[] inputs) -> ()", fake_nothing)
define(
    "update_scale_",
    _update_scale_,
    "(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) found_inf, Tensor(d!)? hysteresis_tracker, "
    "Tensor(e!)? inv_scale_used, Tensor(f!)? found_inf_used, float growth_factor, float backoff_factor, "
    "int growth_interval, int hysteresis, float min_scale, float max_scale, bool dynamic) -> ()",
    fake_nothing,
)
