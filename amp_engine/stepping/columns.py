"""What an optimizer steps, in the order of its groups, as it was when somebody looked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from amp_engine.ground.distributed import is_sharded
from amp_engine.kernels import tensor_lists
from amp_engine.stepping.master import Master


# No object for a row: at 10,000 parameters making one for each would cost more than the step.
class Columns(NamedTuple):
    """One row for each entry of the groups.

    Attributes:
        weights: n; the entries of its groups.
        params: n; the model's own parameters: what a backward accumulates into.
        masters: n; what is between the two, or None where they are one.
        copies: n; those of `params` that have a master, else None.
        plain: the parameters without a master,
        plain_rows: and where they are;
        plain_mask: n; not 0 there.
        has_shards: whether some of `weights` are DTensors.
        asks: whether some of `plain` have a `.grad` of their own to be asked, as masters of another optimizer do;
        weight_handle, param_handle, plain_handle: `weights`, `params` and `plain`, in the form that loops read fastest.
    """

    weights: tuple[nn.Parameter, ...]
    params: tuple[nn.Parameter, ...]
    masters: tuple[Master | None, ...]
    copies: tuple[nn.Parameter | None, ...]
    plain: tuple[nn.Parameter, ...]
    plain_rows: tuple[int, ...]
    plain_mask: bytes
    has_shards: bool
    asks: bool
    weight_handle: Sequence[Tensor]
    param_handle: Sequence[Tensor]
    plain_handle: Sequence[Tensor]


def columns_of(groups: list[dict[str, Any]], find: Callable[[nn.Parameter], Master | None]) -> Columns:
    """What is in `groups`; `find` gives the master of an entry, or None."""
    weights = tuple(p for group in groups for p in group["params"])
    masters = tuple(map(find, weights))
    copies = tuple(None if m is None else m.param for m in masters)
    params = tuple(w if p is None else p for w, p in zip(weights, copies, strict=True))
    plain_rows = tuple(row for row, m in enumerate(masters) if m is None)
    plain = tuple(weights[row] for row in plain_rows)
    mask = bytes(m is None for m in masters)
    handles = [tensor_lists.params(tensors) for tensors in (weights, params, plain)]
    asks = tensor_lists.asks_for_gradients(plain)
    has_shards = any(map(is_sharded, weights))
    return Columns(weights, params, masters, copies, plain, plain_rows, mask, has_shards, asks, *handles)


NO_COLUMNS = columns_of([], lambda _: None)
