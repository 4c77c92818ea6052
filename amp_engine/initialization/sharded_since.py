"""Refuse parameters that sharding replaced after `initialize`: no optimizer would step the new ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from amp_engine.errors import AmpStateError
from amp_engine.ground.distributed import fsdp1_around, fsdp1_in, has_ranks, is_any_sharded, is_sharded
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.scaling.losses import Scaling
from amp_engine.stepping.record import Record


def refusal_of_replaced(models: Sequence[nn.Module], scaling: Scaling) -> Callable[[Record], None]:
    """A check that raises AmpStateError if `models` were sharded after this call."""
    if any(map(is_any_sharded, models)):
        return lambda record: None
    # Ids, because torch cannot swap a parameter that has a weak reference.
    before = [(weakref.ref(model), {id(param) for param in model.parameters()}) for model in models]

    def check(record: Record) -> None:
        if not has_ranks():
            return
        params = record.columns.params
        # Each rank decides on its own shards, unless process_group named the ranks that agree.
        needs_whole = record.rows.kind is not None or (scaling.is_active and not record.ranks.are_said)
        for ref, ids in before:
            model = ref()
            ours = {id(param) for param in params} & ids
            if model is None or not ours:
                continue
            wrapper = fsdp1_around(model) or fsdp1_in(model)
            is_gone = not ours <= {id(param) for param in model.parameters()}
            if wrapper is not None and (is_gone or needs_whole):
                what = "has replaced" if is_gone else "has made shards of"
                name = type(wrapper).__name__
                raise AmpStateError(_text(record, model, f"{name} {what}", f"{name}(model)", is_gone))
            if is_gone and wrapper is None and is_any_sharded(model):
                raise AmpStateError(_text(record, model, "DTensors have replaced", "fully_shard(model)", True))

    return check


def _text(record: Record, model: nn.Module, what: str, call: str, is_gone: bool) -> str:
    optimizer = type(record.optimizer).__name__
    why = (
        f"{optimizer} steps the old ones, so they would never train"
        if is_gone
        else "each rank would decide on an overflow of its own"
    )
    return (
        f"{what} parameters of this {type(model).__name__} since amp.initialize: {why}.  Call {call}, or what else "
        f"shards it, first, then make the {optimizer}, then call amp.initialize(model, optimizer, opt_level='O4')."
    )


def refuse_sharded_since(optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
    """Raise AmpStateError for an optimizer of shards, made after `models` were cast, where there are masters."""
    shards = [p for group in optimizer.param_groups for p in group["params"] if is_sharded(p) and is_low_precision(p)]
    wrapper = next((found for model in models if (found := fsdp1_around(model) or fsdp1_in(model)) is not None), None)
    if not shards and wrapper is None:
        return
    name, kind = "fully_shard" if wrapper is None else type(wrapper).__name__, type(optimizer).__name__
    raise AmpStateError(
        f"{name} has made shards of this {type(models[0]).__name__} since amp.initialize, which get no FP32 masters, "
        f"and {kind} would step them.  Nothing was stepped.  Call {name}(model), or what else shards it, first, then "
        f"make the {kind}, then call amp.initialize(model, optimizer, opt_level='O4')."
    )
