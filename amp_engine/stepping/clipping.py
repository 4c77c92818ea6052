"""Clipping of gradients, by the norm from the check if it is the norm of these gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.ground.distributed import is_sharded
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.ground.torch_private import lazy_clone
from amp_engine.kernels import is_lazy
from amp_engine.stepping.record import Record
from amp_engine.stepping.reduction import norm_over


class Clipped(NamedTuple):
    """The gradients that a call clips.

    Attributes:
        params: have the gradients in `.grad`; can be iterated only once.
        involved: the records of these parameters.
        is_whole: True if `params` are exactly those of one optimizer.
    """

    params: Iterable[Tensor]
    involved: list[Record]
    is_whole: bool


def of_optimizer(groups: Sequence[dict[str, Any]], record: Record | None) -> Clipped:
    """Return the gradients that an optimizer steps; `record` is None if it was not initialized."""
    params = (p for group in groups for p in group["params"])  # listed only if their gradients are to be read
    return Clipped(params, [] if record is None else [record], True)


def of_parameters(given: Sequence[Tensor], everyone: Sequence[Record]) -> Clipped:
    """Return the gradients of `given`, which are parameters of a model or masters."""
    ids = set(map(id, given))
    owned: dict[int, Tensor] = {}
    for one in everyone:
        for beside, weight in zip(one.columns.beside, one.columns.weights, strict=True):
            if beside is not None and id(weight) in ids:
                owned[id(weight)] = beside.param
    params = [owned.get(id(p), p) for p in given]
    ids = set(map(id, params))
    involved = [one for one in everyone if not ids.isdisjoint(one.param_ids())]
    if len(involved) != 1:
        return Clipped(params, involved, False)
    own = involved[0].param_ids()
    is_whole = ids >= own and all(id(p) in own or p.grad is None for p in params)
    return Clipped(params, involved, is_whole)


def clip_grad_norm_(
    clipped: Clipped, max_norm: float, norm_type: float, error_if_nonfinite: bool, look: Callable[[Record], None]
) -> Tensor:
    """Clip gradients, for `Engine.clip_grad_norm_`, which documents the cases; `look` checks those that no check saw.

    Returns:
        The norm before clipping: float32, shape []. No host sync without `error_if_nonfinite`.
    """
    _refuse_released(clipped, "clip_grad_norm_")
    parts = None
    for one in clipped.involved:
        one.refuse_written_after_clip(is_clipping=True)
        if one.ranks.in_flat_shards:
            raise AmpStateError(
                "amp.clip_grad_norm_() sees one rank's shards of a FullyShardedDataParallel, so that each rank would "
                f"clip by a norm of its own.  Call model.clip_grad_norm_({max_norm}) of the wrapper, at the same place."
            )
        if parts is None:
            parts = one.ranks.of_parts()
    record = clipped.involved[0] if clipped.is_whole and clipped.involved else None
    taken = None if record is None else record.whole_norm(float(norm_type))
    if taken is None:
        for one in clipped.involved:
            look(one)
        taken = None if record is None else record.whole_norm(float(norm_type))
    params = [] if taken is not None else _with_readable_gradients(clipped)
    norm = _total_norm(params, norm_type) if taken is None else taken
    if parts is not None:
        norm = norm_over(parts, norm, float(norm_type))
    if error_if_nonfinite and devices.is_capturing(norm.device):
        raise AmpStateError(
            "amp.clip_grad_norm_(..., error_if_nonfinite=True) is captured in a CUDA graph, where nothing may wait for "
            "the norm.  Leave out error_if_nonfinite: the step is skipped on the GPU where the norm is not finite."
        )
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise AmpStateError(
            f"The norm of order {norm_type} of the gradients is {float(norm)}, so they cannot be clipped.  Leave "
            "out error_if_nonfinite=True to have the step skipped instead."
        )
    if record is None or (taken is None and not record.can_clip_in_step()):
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        for one in clipped.involved:
            one.note_clipped()
    else:
        record.clip_whole(norm, float(max_norm), is_seen=taken is not None)
        norm = lazy_clone(norm)  # which the caller may write
    return norm


def clip_grad_value_(clipped: Clipped, clip_value: float, look: Callable[[Record], None]) -> None:
    """Clip each element of gradients to [-clip_value, clip_value]; `look` as in `clip_grad_norm_`. No host sync."""
    _refuse_released(clipped, "clip_grad_value_")
    for one in clipped.involved:
        one.refuse_written_after_clip(is_clipping=True)
        look(one)
    torch.nn.utils.clip_grad_value_(_with_readable_gradients(clipped), clip_value)
    for one in clipped.involved:
        one.note_clipped()


def _refuse_released(clipped: Clipped, call: str) -> None:
    if any(one.releases for one in clipped.involved):
        raise AmpStateError(
            f"amp.{call}() finds no gradient to clip: with release_gradients=True the backward has stepped and freed "
            "each.  Leave out the clipping, or release_gradients."
        )


def _with_readable_gradients(clipped: Clipped) -> list[Tensor]:
    """Return the parameters, with an earlier clipping done. Replaces lazy gradients by clones, which can be written."""
    listed = [*clipped.params]
    for one in clipped.involved:
        one.complete_gradients()
    for param in listed:
        if (grad := param.grad) is not None and is_lazy(grad):
            param.grad = grad.clone()
    return listed


def _total_norm(params: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients as torch does, but of half ones in FP32: their squares need its digits."""
    half: list[Tensor] = []
    others: list[Tensor] = []
    for grad in (p.grad for p in params if p.grad is not None):
        if not is_low_precision(grad) or grad.layout is not torch.strided:
            others.append(grad)
        elif is_sharded(grad):
            others.append(grad.float())  # a DTensor of torch 2.14 takes `dtype` for a dimension
        else:
            half.append(grad)
    norms = torch._foreach_norm(half, float(norm_type), dtype=torch.float32) if half else ()
    norm = torch.nn.utils.get_total_norm([*norms, *others], norm_type)
    return norm.to(params[0].device) if params else norm  # without gradients the norm is on the CPU
