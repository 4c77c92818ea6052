"""What a step reads and writes: one row for each entry of the optimizer's groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from amp_engine.kernels import walk
from amp_engine.stepping.lazy_gradients import Unscaling
from amp_engine.stepping.master_weights import MasterWeights
from amp_engine.stepping.roster import roster_of


class Rows(NamedTuple):
    """What an optimizer steps, one row for each parameter in the order of its groups.

    Attributes:
        weights: masters, or the parameters themselves.
        gradients: low-precision and scaled where they were kept, else as `.grad` has them.
        copies: the model's parameters behind masters.
        scaled: which gradients are still scaled,
        unscaling: and what by.
        known: whether all gradients are known to be dense, of the kernels' types, and laid out as their weights.
    """

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    copies: Sequence[Tensor | None]
    scaled: list[bool]
    unscaling: Unscaling | None
    known: bool


def rows_of(optimizer: Optimizer, masters: MasterWeights | None) -> Rows:
    """What the next step of `optimizer` has to do, as of the last scan of its masters."""
    roster = roster_of(optimizer, masters)
    written = masters is not None and walk.any_gradient(masters.weights)
    if written and masters is not None:
        for master in masters.in_groups:
            if master.gradient() is not None:
                master.materialize()  # autograd wrote into the master itself, beside what is kept
    kept = None if masters is None else masters.kept
    if kept is not None and kept.is_whole and not written and not roster.plain:
        return Rows(roster.weights, kept.grads, roster.copies, [True] * len(kept.grads), kept.unscaling, True)
    held = bytes(len(roster.weights)) if kept is None else bytes(kept.held)
    gradients: Sequence[Tensor | None]
    if roster.asks:
        gradients, known = [None if h else w.grad for h, w in zip(held, roster.weights, strict=True)], False
    else:
        gradients, walks, _ = walk.gradients(roster.weight_handle)
        known = walk.OTHER not in walks
    if kept is not None:
        gradients = walk.either(held, kept.grads, gradients)
    return Rows(
        roster.weights,
        gradients if known else list(gradients),  # FusedStep looks at those of a list one by one
        roster.copies,
        [h != 0 for h in held],
        None if kept is None else kept.unscaling,
        known,
    )
