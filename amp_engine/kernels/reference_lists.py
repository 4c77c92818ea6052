"""The plain PyTorch truth of the list operations, on any device. None of them waits for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_engine.kernels.backend import Checks, TensorList
from amp_engine.kernels.refusals import check_lists, check_scalars


@torch.no_grad()
def nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Which of `tensors` hold an inf or a NaN.

    Args:
        tensors: n dense floating tensors of any shapes and floating types, all on one device.

    Returns:
        bool tensor of shape [n] on that device. The largest magnitude decides: a *finite* tensor whose
        squares overflow is not reported.
    """
    return ~torch.isfinite(_per_tensor(tensors, math.inf, torch.float64))


@torch.no_grad()
def check(tensors: Sequence[Tensor]) -> Checks:
    """Look at every element once, see `Checks`."""
    check_lists("check", {"tensors": tensors})
    return checks_of(tensors)


@torch.no_grad()
def l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(2-norm over all of `tensors`, of each of them): float32, shapes [] and [n]."""
    check_lists("l2norm", {"tensors": tensors})
    sum_squares = _sum_squares(tensors)
    return sum_squares.sum().sqrt().float(), sum_squares.sqrt().float()


@torch.no_grad()
def unscaled(tensors: Sequence[Tensor], inv_scale: Tensor) -> list[Tensor]:
    """`[t.float() * inv_scale for t in tensors]`: float32, shapes and strides as given.

    Args:
        inv_scale: float32, shape [], on the device of `tensors`.
    """
    check_lists("unscaled", {"tensors": tensors})
    check_scalars("unscaled", _device(tensors), inv_scale=inv_scale)
    copies = [t.to(torch.float32, copy=True) for t in tensors]
    if copies:
        torch._foreach_mul_(copies, inv_scale)
    return copies


@torch.no_grad()
def unscale_(tensors: Sequence[Tensor], inv_scale: Tensor) -> Checks:
    """`t *= inv_scale` for each t, rounded once to the type of t.

    Args:
        inv_scale: float32, shape [], on the device of `tensors`.
    """
    check_lists("unscale_", {"tensors": tensors}, ["tensors"])
    check_scalars("unscale_", _device(tensors), inv_scale=inv_scale)
    checks = checks_of(tensors)
    _scale_(tensors, tensors, inv_scale)
    return checks


@torch.no_grad()
def scale_(outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: Tensor) -> Checks:
    """`output[...] = input * factor` pairwise, computed in float32 and rounded once to the type of each output.

    Args:
        factor: float32, shape [], on the device of `inputs`.
    """
    check_lists("scale_", {"inputs": inputs, "outputs": outputs}, ["outputs"])
    check_scalars("scale_", _device(inputs), factor=factor)
    checks = checks_of(inputs)
    _scale_(outputs, inputs, factor)
    return checks


@torch.no_grad()
def axpby_(
    outputs: Sequence[Tensor], xs: Sequence[Tensor], ys: Sequence[Tensor], a: Tensor | None, b: Tensor | None
) -> Checks:
    """`output[...] = fma(a, x, b * y)` triple by triple, in float32, rounded once to the type of each output.

    Args:
        outputs: each possibly its x or its y.
        a, b: float32, shape [], on the device of `xs`; None is 1.

    Returns:
        What was found in `xs`.
    """
    check_lists("axpby_", {"xs": xs, "ys": ys, "outputs": outputs}, ["outputs"])
    check_scalars("axpby_", _device(xs), a=a, b=b)
    checks = checks_of(xs)
    for output, x, y in zip(outputs, xs, ys, strict=True):
        by = y.float() if b is None else y.float() * b
        # In float64 the product is exact, so the sum is rounded as by an fma, but for ties of float32.
        ax = x.double() if a is None else x.double() * a.double()
        output.copy_((ax + by.double()).float())
    return checks


@torch.no_grad()
def accumulate_(totals: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """`total += tensor` pairwise, in the type of `totals`, which may be any."""
    if totals:
        torch._foreach_add_(list(totals), list(tensors))


@torch.no_grad()
def cast_copy_(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """`output[...] = input` pairwise, rounded to nearest even into the type of each output."""
    check_lists("cast_copy_", {"inputs": inputs, "outputs": outputs}, ["outputs"])
    if outputs:
        torch._foreach_copy_(list(outputs), list(inputs))


@torch.no_grad()
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    hysteresis_tracker: Tensor | None,
    inv_scale_used: Tensor | None,
    found_inf_used: Tensor | None,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
    dynamic: bool,
) -> None:
    """Adjust a dynamic loss scale after one backward, in place.

        inv_scale_used = 1 / scale
        found_inf_used, found_inf = found_inf, 0
        if not dynamic:
            growth_tracker += 1
        elif found_inf_used != 0:
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

    Args:
        scale: float32, shape []. Computed in float64, rounded once.
        growth_tracker: int32, shape []: clean backwards since the scale last moved.
        found_inf: float32, shape []. Tested `!= 0`, since it may be a sum over devices or ranks. Left alone unless
            there is a `found_inf_used`.
        hysteresis_tracker: int32, shape []: overflows that are still let pass. None: the first one counts.
        dynamic: False: the scale stays, and the count runs on.
        inv_scale_used: float32, shape [], written.
        found_inf_used: float32, shape [], written.
    """
    device = scale.device
    check_scalars(
        "update_scale_",
        device,
        scale=scale,
        found_inf=found_inf,
        inv_scale_used=inv_scale_used,
        found_inf_used=found_inf_used,
    )
    check_scalars(
        "update_scale_", device, torch.int32, growth_tracker=growth_tracker, hysteresis_tracker=hysteresis_tracker
    )
    wide = scale.double()
    bad = found_inf != 0
    if inv_scale_used is not None:
        inv_scale_used.copy_(wide.reciprocal())
    if found_inf_used is not None:
        found_inf_used.copy_(found_inf)
        found_inf.zero_()
    if not dynamic:
        growth_tracker.add_(1)
        return
    backs_off = bad
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


class ListCheck:
    """`check` and `unscale_` over one list in one pass. Keeps nothing from one run to the next."""

    @torch.no_grad()
    def run(
        self,
        tensors: TensorList,
        outputs: TensorList | None,
        scale: Tensor,
        found_inf: Tensor,
        norm: Tensor,
    ) -> Checks:
        """See `kernels.ListCheck.run`."""
        device = norm.device
        lists: dict[str, TensorList] = {"xs": tensors}
        if outputs is not None:
            lists["outputs"] = outputs
        check_lists("check", lists, written=[name for name in lists if name == "outputs"], device=device)
        given = [i for i, t in enumerate(tensors) if t is not None]
        present = [t for t in tensors if t is not None]
        found = check(present)
        inv_scale = scale.double().reciprocal().float()
        checks = Checks(
            torch.zeros(len(tensors), dtype=torch.bool, device=device),
            torch.zeros(len(tensors), dtype=torch.float64, device=device),
            torch.zeros(len(tensors), dtype=torch.float32, device=device),
        )
        for whole, part in zip(checks, found, strict=True):
            whole[given] = part
        found_inf.copy_(torch.maximum(found_inf, checks.nonfinite.any().float()))
        norm.copy_((checks.sum_squares.sum().sqrt() / scale.double()).float())
        if outputs is not None:
            pairs = [(o, t) for o, t in zip(outputs, tensors, strict=True) if o is not None and t is not None]
            scale_([o for o, _ in pairs], [t for _, t in pairs], inv_scale)
        return checks

    @torch.no_grad()
    def multiply_(self, tensors: TensorList, factor: Tensor) -> None:
        """See `kernels.ListCheck.multiply_`."""
        check_lists("multiply_", {"xs": tensors, "outputs": tensors}, ["outputs"], device=factor.device)
        for t in tensors:
            if t is not None:
                t.copy_(t.float() * factor)


def _scale_(outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: Tensor) -> None:
    for output, given in zip(outputs, inputs, strict=True):
        # A 0-d factor takes the type of the tensor it multiplies, and 1/scale may be below half's range.
        output.copy_(given.float() * factor)


def checks_of(tensors: TensorList) -> Checks:
    """What `check` finds of lists that were looked at; 0 where there is no tensor."""
    largest = _per_tensor(tensors, math.inf, torch.float32)
    return Checks(~torch.isfinite(largest), _sum_squares(tensors), largest)


def _sum_squares(tensors: TensorList) -> Tensor:
    return _per_tensor(tensors, 2, torch.float64).square()


def _per_tensor(tensors: TensorList, order: float, dtype: torch.dtype) -> Tensor:
    """The norm of each tensor, shape [n]; 0 where there is none, or no element."""
    filled = [t for t in tensors if t is not None and t.numel()]
    # A maximum needs no wider type than the values have.
    found = iter(torch._foreach_norm(filled, order, dtype=None if order == math.inf else dtype) if filled else [])
    zero = torch.zeros((), dtype=dtype, device=_device(tensors))
    norms = [next(found).to(dtype) if t is not None and t.numel() else zero for t in tensors]
    return torch.stack(norms) if norms else zero.new_zeros(0)


def _device(tensors: TensorList) -> torch.device | None:
    """Where the first tensor is; None, which is the default device, if there is none."""
    return next((t.device for t in tensors if t is not None), None)
