"""Weights, parameters and masters of an optimizer at one moment, in the order of its groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from amp_engine.ground.distributed import is_sharded
from amp_engine.kernels import tensor_lists
from amp_engine.stepping.master import Master


# A row has no object of its own: at 10,000 parameters, to make them would cost more than the step.
class Columns(NamedTuple):
    """One row for each entry of the groups.

    Attributes:
        weights: n; the entries of the groups.
        params: n; the model's own parameters, which a backward accumulates into.
        masters: n; the master of each row, or None if its weight is the parameter.
        copies: n; the parameters that have a master, else None.
        plain: the parameters without a master.
        plain_rows: the rows of `plain`.
        plain_mask, master_mask: n; 1 in the rows of `plain` and in all others, respectively; else 0.
        has_shards: True if some of `weights` are DTensors.
        asks: True if some of `plain` compute their `.grad` when read, as masters of another optimizer do.
        weight_handle, param_handle, plain_handle: `weights`, `params` and `plain`, in the form that is fastest to read.
    """

    weights: tuple[nn.Parameter, ...]
    params: tuple[nn.Parameter, ...]
    masters: tuple[Master | None, ...]
    copies: tuple[nn.Parameter | None, ...]
    plain: tuple[nn.Parameter, ...]
    plain_rows: tuple[int, ...]
    plain_mask: bytes
    master_mask: bytes
    has_shards: bool
    asks: bool
    weight_handle: Sequence[Tensor]
    param_handle: Sequence[Tensor]
    plain_handle: Sequence[Tensor]


def columns_of(groups: list[dict[str, Any]], find: Callable[[nn.Parameter], Master | None]) -> Columns:
    """Return the columns of `groups`; `find` gives the master of an entry, or None."""
    weights = tuple(p for group in groups for p in group["params"])
    masters = tuple(map(find, weights))
    copies = tuple(None if m is None else m.param for m in masters)
    params = tuple(w if p is None else p for w, p in zip(weights, copies, strict=True))
    plain_rows = tuple(row for row, m in enumerate(masters) if m is None)
    plain = tuple(weights[row] for row in plain_rows)
    masks = bytes(m is None for m in masters), bytes(m is not None for m in masters)
    handles = [tensor_lists.params(tensors) for tensors in (weights, params, plain)]
    asks = tensor_lists.asks_for_gradients(plain)
    has_shards = any(map(is_sharded, weights))
    return Columns(weights, params, masters, copies, plain, plain_rows, *masks, has_shards, asks, *handles)


NO_COLUMNS = columns_of([], lambda _: None)
