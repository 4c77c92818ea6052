"""The operations on lists of tensors. None of them waits for a device.

Each body is plain PyTorch, and computes if there are no compiled kernels.
Wrong arguments raise AmpValueError before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_engine.kernels.backend import Checks, TensorList
from amp_engine.kernels.library import fake_nothing, operation
from amp_engine.kernels.refusals import check_lists, check_scalars

_CHECKS = "(Tensor, Tensor, Tensor)"


def _fake_checks(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    n, device = len(tensors), _device(tensors)
    return (
        torch.empty(n, dtype=torch.bool, device=device),
        torch.empty(n, dtype=torch.float64, device=device),
        torch.empty(n, dtype=torch.float32, device=device),
    )


@operation(f"(Tensor[] tensors) -> {_CHECKS}", _fake_checks, Checks)
def check(tensors: Sequence[Tensor], /) -> Checks:
    """Find, in one pass, if each tensor has a non-finite element, its sum of squares and its largest magnitude.

    Args:
        tensors: n dense tensors of float16, bfloat16 or float32, mixed freely, on one device.

    Returns:
        See `Checks`. The largest magnitude decides: a finite tensor whose squares overflow is not reported.
    """
    check_lists("check", {"tensors": tensors})
    return checks_of(tensors)


@operation(
    f"(Tensor(a!)[] outputs, Tensor[] inputs, Tensor factor) -> {_CHECKS}",
    lambda outputs, inputs, factor: _fake_checks(inputs),
    Checks,
)
def scale_(outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: Tensor, /) -> Checks:
    """Compute `output[...] = input * factor` pairwise, in float32, rounded once to the type of each output.

    Args:
        outputs: of the shapes and strides of `inputs`, each possibly the input itself.
        inputs: like the tensors of `check`.
        factor: float32, shape [], on the device of `inputs`.

    Returns:
        The findings about `inputs` before any write.
    """
    check_lists("scale_", {"inputs": inputs, "outputs": outputs}, ["outputs"])
    check_scalars("scale_", _device(inputs), factor=factor)
    checks = checks_of(inputs)
    for output, given in zip(outputs, inputs, strict=True):
        # In float32: a 0-d factor takes the type of the tensor it multiplies, and 1/scale may be below half's range.
        output.copy_(given.float() * factor)
    return checks


@operation(
    f"(Tensor(a!)[] outputs, Tensor[] xs, Tensor[] ys, Tensor? a, Tensor? b) -> {_CHECKS}",
    lambda outputs, xs, ys, a, b: _fake_checks(xs),
    Checks,
)
def axpby_(
    outputs: Sequence[Tensor], xs: Sequence[Tensor], ys: Sequence[Tensor], a: Tensor | None, b: Tensor | None, /
) -> Checks:
    """Compute `output[...] = fma(a, x, b * y)` for each triple, in float32, rounded once to the type of each output.

    Args:
        outputs, xs, ys: of equal shapes and strides; an output may be its x or its y.
        a, b: float32, shape [], on the device of `xs`; None is 1.

    Returns:
        The findings about `xs` before any write.
    """
    check_lists("axpby_", {"xs": xs, "ys": ys, "outputs": outputs}, ["outputs"])
    check_scalars("axpby_", _device(xs), a=a, b=b)
    checks = checks_of(xs)
    for output, x, y in zip(outputs, xs, ys, strict=True):
        by = y.float() if b is None else y.float() * b
        # In float64 the product is exact, so the sum is rounded as by an fma, except for ties of float32.
        ax = x.double() if a is None else x.double() * a.double()
        output.copy_((ax + by.double()).float())
    return checks


@torch.no_grad()
def accumulate_(totals: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Compute `total += tensor` pairwise, in the type of `totals`, which may be any."""
    if totals:
        torch._foreach_add_(list(totals), list(tensors))


@operation("(Tensor(a!)[] outputs, Tensor[] inputs) -> ()", fake_nothing)
def cast_copy_(outputs: Sequence[Tensor], inputs: Sequence[Tensor], /) -> None:
    """Copy `output[...] = input` pairwise, rounded to nearest even into the type of each output."""
    check_lists("cast_copy_", {"inputs": inputs, "outputs": outputs}, ["outputs"])
    if outputs:
        torch._foreach_copy_(list(outputs), list(inputs))


@operation(
    "(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) found_inf, float growth_factor, float backoff_factor, "
    "int growth_interval, float min_scale, float max_scale, Tensor(d!)? hysteresis_tracker=None, int hysteresis=1, "
    "bool dynamic=True, Tensor(e!)? inv_scale_used=None, Tensor(f!)? outcome=None, Tensor? scale_used=None, "
    "Tensor? loss=None) -> ()",
    fake_nothing,
)
def update_scale_(
    scale: Tensor,
    /,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis_tracker: Tensor | None = None,
    hysteresis: int = 1,
    dynamic: bool = True,
    inv_scale_used: Tensor | None = None,
    outcome: Tensor | None = None,
    scale_used: Tensor | None = None,
    loss: Tensor | None = None,
) -> None:
    """Adjust a dynamic loss scale after one backward, in place.

        inv_scale_used = 1 / scale
        outcome[0], outcome[2], outcome[3] = found_inf, scale_used, loss
        found_inf = 0
        if not dynamic:
            growth_tracker += 1
        elif outcome[0] != 0:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(min_scale, scale * backoff_factor)
        else:
            growth_tracker += 1
            hysteresis_tracker = hysteresis
            if growth_tracker >= growth_interval:
                grown = min(max_scale, scale * growth_factor)
                scale = grown if isfinite(grown) else scale
                growth_tracker = 0
        outcome[1] = scale

    Args:
        scale: float32, shape []. Computed in float64, rounded once.
        growth_tracker: int32, shape []: clean backwards since the scale last moved.
        found_inf: float32, shape []. Tested `!= 0`, since it may be a sum over devices or ranks. Not written unless
            there is an `outcome`.
        hysteresis_tracker: int32, shape []: overflows until the scale backs off. None: it backs off at the first.
        dynamic: False: the scale stays, and the count goes on.
        inv_scale_used: float32, shape [], written.
        outcome: float32, shape [4], written.
        scale_used: float32, shape []: the scale of the backward. None: the scale before it moves.
        loss: float32, shape []. None: 0.
    """
    device = scale.device
    check_scalars(
        "update_scale_",
        device,
        scale=scale,
        found_inf=found_inf,
        inv_scale_used=inv_scale_used,
        scale_used=scale_used,
        loss=loss,
    )
    check_scalars(
        "update_scale_", device, torch.int32, growth_tracker=growth_tracker, hysteresis_tracker=hysteresis_tracker
    )
    bad = found_inf != 0
    if inv_scale_used is not None:
        inv_scale_used.copy_(scale.double().reciprocal())
    if outcome is not None:
        outcome[0].copy_(found_inf)
        outcome[2].copy_(scale if scale_used is None else scale_used)
        outcome[3].copy_(torch.zeros_like(scale) if loss is None else loss)
        found_inf.zero_()
    if dynamic:
        wide, backs_off = scale.double(), bad
        if hysteresis_tracker is not None:
            left = torch.where(bad, hysteresis_tracker - 1, hysteresis)
            hysteresis_tracker.copy_(left)
            backs_off = bad & (left <= 0)
        clean = torch.where(bad, 0, growth_tracker + 1)
        grows = clean >= growth_interval
        backed_off = (wide * backoff_factor).clamp(min=min_scale).float()
        grown = (wide * growth_factor).clamp(max=max_scale).float()
        raised = grows & ~bad & torch.isfinite(grown)
        scale.copy_(torch.where(backs_off, backed_off, torch.where(raised, grown, scale)))
        growth_tracker.copy_(torch.where(grows, 0, clean))
    else:
        growth_tracker.add_(1)
    if outcome is not None:
        outcome[1].copy_(scale)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor of torch.nn.utils.clip_grad_norm_: float64, shape []. No host sync."""
    return (max_norm / (norm.double() + 1e-6)).clamp(max=1.0)


def checks_of(tensors: TensorList, device: torch.device | None = None) -> Checks:
    """Compute `check` of lists that need no validation, on `device`; the findings of None are 0."""
    largest = _per_tensor(tensors, math.inf, torch.float32, device)
    return Checks(~torch.isfinite(largest), _per_tensor(tensors, 2, torch.float64, device).square(), largest)


def _per_tensor(tensors: TensorList, order: float, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return the norm of each tensor, shape [n]; 0 for None and for tensors without elements."""
    filled = [t for t in tensors if t is not None and t.numel()]
    # A maximum needs no wider type than the values have.
    found = torch._foreach_norm(filled, order, dtype=None if order == math.inf else dtype) if filled else []
    norms = torch.zeros(len(tensors), dtype=dtype, device=device or _device(tensors))
    # Not by torch.stack, which refuses float64 under autocast for CPUs.
    places = [place for place, t in zip(norms.unbind(), tensors, strict=True) if t is not None and t.numel()]
    if places:
        torch._foreach_copy_(places, list(found))
    return norms


def _device(tensors: TensorList) -> torch.device | None:
    """Return the device of the first tensor; None, the default device, if there is none."""
    return next((t.device for t in tensors if t is not None), None)
