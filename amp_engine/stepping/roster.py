"""What an optimizer steps, in the order of its groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine.kernels import walk
from amp_engine.stepping.master import Master

if TYPE_CHECKING:
    from amp_engine.stepping.master_weights import MasterWeights


class Roster(NamedTuple):
    """What an optimizer steps, in the order of its groups.

    Attributes:
        weights: n; the entries of its groups.
        params: n; the model's own parameters: what a backward accumulates into.
        masters: n; what is between the two, or None where they are one.
        copies: n; those of `params` that have a master, else None.
        plain: the parameters without a master,
        plain_rows: and where they are;
        plain_mask: n; not 0 there.
        asks: whether some of `plain` have a `.grad` of their own to be asked, as masters of another optimizer do;
        weight_handle, param_handle, plain_handle: `weights`, `params` and `plain`, to be walked fast.
    """

    weights: tuple[nn.Parameter, ...]
    params: tuple[nn.Parameter, ...]
    masters: tuple[Master | None, ...]
    copies: tuple[nn.Parameter | None, ...]
    plain: tuple[nn.Parameter, ...]
    plain_rows: tuple[int, ...]
    plain_mask: bytes
    asks: bool
    weight_handle: Sequence[Tensor]
    param_handle: Sequence[Tensor]
    plain_handle: Sequence[Tensor]


def make_roster(groups: list[dict[str, Any]], find: Callable[[nn.Parameter], Master | None]) -> Roster:
    """What is in `groups`; `find` gives the master of an entry, or None."""
    weights = tuple(p for group in groups for p in group["params"])
    masters = tuple(map(find, weights))
    copies = tuple(None if m is None else m.param for m in masters)
    params = tuple(w if p is None else p for w, p in zip(weights, copies, strict=True))
    plain_rows = tuple(row for row, m in enumerate(masters) if m is None)
    plain = tuple(weights[row] for row in plain_rows)
    mask = bytes(m is None for m in masters)
    handles = [walk.params(tensors) for tensors in (weights, params, plain)]
    asks = walk.asks_for_gradients(plain)
    return Roster(weights, params, masters, copies, plain, plain_rows, mask, asks, *handles)


NO_ROSTER = make_roster([], lambda _: None)

# Of optimizers without masters, from the entry of `scale_loss` to the step: the parameters of their groups, and what
# follows from them. No longer, since a parameter may refer to its optimizer, which would then never be freed.
_PLAIN_ROSTERS: weakref.WeakKeyDictionary[Optimizer, tuple[list[tuple[nn.Parameter, ...]], Roster]] = (
    weakref.WeakKeyDictionary()
)


def roster_of(optimizer: Optimizer, masters: MasterWeights | None) -> Roster:
    """What `optimizer` steps, as of the last scan of its masters."""
    if masters is not None:
        return masters.roster
    groups = optimizer.param_groups
    scanned, roster = _PLAIN_ROSTERS.get(optimizer, ([], NO_ROSTER))
    if not have_same(groups, scanned):
        roster = make_roster(groups, lambda _: None)
        _PLAIN_ROSTERS[optimizer] = [tuple(group["params"]) for group in groups], roster
    return roster


def forget_roster(optimizer: Optimizer) -> None:
    """Hold the parameters of an optimizer without masters no longer, whose iteration is over."""
    _PLAIN_ROSTERS.pop(optimizer, None)


def have_same(groups: list[dict[str, Any]], params: list[tuple[nn.Parameter, ...]]) -> bool:
    """Whether the groups still have the very same parameters."""
    return len(groups) == len(params) and all(
        walk.same_objects(group["params"], was) for group, was in zip(groups, params, strict=True)
    )
