"""Finds the optimizers that a loss reaches, from its graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from amp_engine.stepping.record import Record

CHECKPOINT = "CheckpointFunctionBackward"
"""The node of a reentrant checkpoint. Its backward runs a graph of its own, which is not in the graph of the loss."""


def leaf_of(node: Node | None) -> Tensor | None:
    """Return the parameter whose gradient `node` accumulates, or None."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def reached_by(loss: Tensor, everyone: Sequence[Record]) -> list[Record]:
    """Return those of `everyone` with a parameter to which a backward of `loss` gives a gradient, in their order.

    Walks the graph until all are found: with one optimizer, until one of its parameters is. Optimizers of shards count
    as reached by any loss, since a forward computes with other tensors. No host sync.
    """
    if not loss.requires_grad:
        return []
    missing = {one: one.param_ids() for one in everyone if not one.has_shards}
    for leaf in _leaves(loss) if missing else ():
        if leaf is None:
            return [*everyone]
        for one in [one for one, ids in missing.items() if id(leaf) in ids]:
            del missing[one]
        if not missing:
            break
    return [one for one in everyone if one not in missing]


def _leaves(loss: Tensor) -> Iterator[Tensor | None]:
    """Yield each tensor to which a backward of `loss` gives a gradient; None where a part of the graph is hidden."""
    if loss.grad_fn is None:
        yield loss
        return
    left = [loss.grad_fn]
    seen = set(left)
    while left:
        node = left.pop()
        if node.name() == CHECKPOINT:
            yield None
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            leaf = leaf_of(following)
            if leaf is None:
                left.append(following)
            else:
                yield leaf
