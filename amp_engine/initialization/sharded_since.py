"""Refuse parameters that sharding replaced after `initialize`: no optimizer would step the new ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import nn

from amp_engine.errors import AmpStateError
from amp_engine.ground.distributed import fsdp1_around, fsdp1_in, has_ranks, is_any_sharded
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
