"""What the graph of a loss tells of its forward: the order of parameters, and where it stopped to be finite."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

# What these give is what they took, in another shape, so that they never made it.
_PASSING = {"view", "unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "clone", "alias"}
_PASSING |= {"select", "slice", "split", "unbind", "as_strided", "reshape_alias"}
_COMPILED = "CompiledFunction"

Order = Mapping[int, tuple[int, int]]


class Origin(NamedTuple):
    """Where a forward stopped to be finite, as far as its graph tells.

    Attributes:
        operation: of autograd, that gave the first value that is not finite, "softmax"; None if it was given
            that value from outside of the graph.
        took: the operation that was given it, where `operation` is None.
        parameter: id of a parameter that the operation used, or else of the last one used before it; None without any.
        is_parameter: whether what came from outside is that parameter itself.
        is_exact: whether all that `operation` was given is known to be finite. An addition, say, saves nothing of it.
    """

    operation: str | None
    took: str | None
    parameter: int | None
    is_parameter: bool
    is_exact: bool = True


def forward_order(loss: Tensor) -> dict[int, tuple[int, int]]:
    """For each parameter behind `loss`, by id: numbers that are larger the later in the forward it was last used.

    The second number tells apart what one operation uses: a compiled model is one, to which torch.compile passes
    parameters in the order of their first use. Takes about a microsecond an operation, also after the backward, which
    frees what operations saved and leaves how they are connected. No host sync.
    """
    order: dict[int, tuple[int, int]] = {}
    for node in _nodes(loss):
        number = node._sequence_nr()
        for place, (following, _) in enumerate(node.next_functions):
            if (param := _leaf(following)) is not None:
                order[id(param)] = max(order.get(id(param), (0, 0)), (number, place))
    return order


def origin_of_nonfinite(loss: Tensor) -> Origin | None:
    """Which operation behind `loss` gave the first value that is not finite, by what operations saved for the backward.

    To be called before the backward. -inf alone counts only where nothing else is found: masks are made of it. What was
    saved through hooks, as activation checkpointing does, is not looked at, since it may be there for one look only.
    Waits for the device, and reads all that was saved.

    Returns:
        None if nothing that was saved tells, and where the first may be inside of what torch.compile compiled.
    """
    nodes = sorted(_nodes(loss), key=lambda node: node._sequence_nr())
    compiled = min((node._sequence_nr() for node in nodes if name_of(node) == _COMPILED), default=math.inf)
    found: dict[bool, tuple[float, Node, Tensor]] = {}  # by whether it is -inf alone: the earliest
    finite: set[Node] = set()  # whose results were saved
    has_data = set()  # to which something was given from outside that was saved
    for node in nodes:
        for name, saved in _saved(node):
            if not saved.is_floating_point() or saved.isfinite().all():
                if saved.grad_fn is None:
                    has_data.add(node)
                else:
                    finite.add(_maker(saved.grad_fn))
                continue
            source = None if saved.grad_fn is None else _maker(saved.grad_fn)
            if source is None and not saved.requires_grad and _is_result(name):
                continue  # a statistic, which follows from the inputs
            when = node._sequence_nr() - 0.5 if source is None else source._sequence_nr()
            only_masks = not bool((saved.isnan() | saved.isposinf()).any())
            if only_masks not in found or when < found[only_masks][0]:
                found[only_masks] = when, node, saved
    if not found:
        return None
    when, node, saved = found[min(found)]
    if when >= compiled:
        return None
    maker = None if saved.grad_fn is None else _maker(saved.grad_fn)
    if maker is None and saved.requires_grad:
        return Origin(None, name_of(node), id(saved), True)
    return Origin(
        None if maker is None else name_of(maker),
        name_of(node) if maker is None else None,
        _parameter_near(loss, node if maker is None else maker),
        False,
        maker is None or all(_is_known(one, finite, maker in has_data) for one, _ in maker.next_functions),
    )


def _is_known(node: Node | None, finite: set[Node], has_data: bool) -> bool:
    """Whether what `node` gave, or data where it is None, is known to be finite."""
    if node is None:
        return has_data
    maker = _maker(node)
    return maker in finite or _leaf(maker) is not None or _only_of_a_parameter(maker)


def _only_of_a_parameter(node: Node) -> bool:
    """Whether it is a view or a cast of a parameter."""
    while len(node.next_functions) == 1 and (before := node.next_functions[0][0]) is not None:
        if _leaf(before) is not None:
            return name_of(node) in _PASSING or name_of(node) == "to_copy"
        node = before
    return False


def _nodes(loss: Tensor) -> Iterator[Node]:
    """Every operation behind `loss`, each once."""
    seen: set[object] = set()
    left = [] if loss.grad_fn is None else [loss.grad_fn]
    while left:
        node = left.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen and _leaf(following) is None:
                seen.add(following)
                left.append(following)


def _maker(node: Node) -> Node:
    """What made the values that `node` gave."""
    while name_of(node) in _PASSING and node.next_functions:
        before = node.next_functions[0][0]
        if before is None or _leaf(before) is not None:
            break
        node = before
    return node


def _leaf(node: Node | None) -> Tensor | None:
    """The parameter whose gradient is accumulated here, or None."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def _parameter_near(loss: Tensor, node: Node) -> int | None:
    """Id of the parameter that `node` uses, also through views and casts of it, or else of the last used before."""
    order = forward_order(loss)
    own = parameters_of(node)
    earlier = own or [param for param, (number, _) in order.items() if number <= node._sequence_nr()]
    return max(earlier, key=order.__getitem__, default=None)


def parameters_of(node: Node) -> list[int]:
    """Ids of the parameters that an operation uses, as they are or through views and casts of one alone."""
    return [id(p) for following in _around(node) if (p := _leaf(following)) is not None]


def _around(node: Node) -> Iterator[Node]:
    """What `node` takes, and what single chains of operations on a parameter alone take."""
    for following, _ in node.next_functions:
        while following is not None and len(following.next_functions) == 1 and _leaf(following) is None:
            only = following.next_functions[0][0]
            if only is None or len(only.next_functions) > 1:
                break
            following = only
        if following is not None:
            yield following


def _saved(node: Node) -> Iterator[tuple[str, Tensor]]:
    """What `node` saved for the backward, but what was saved through hooks."""
    for raw_name in dir(node):
        if not raw_name.startswith("_raw_saved_"):
            continue
        name = raw_name.removeprefix("_raw")
        try:
            raw = getattr(node, raw_name)
            raws = raw if isinstance(raw, (tuple, list)) else [raw]
            if not hasattr(node, name) or not all(map(_has_no_hooks, raws)):
                continue
            saved = getattr(node, name)
        except RuntimeError:  # freed by an earlier backward
            continue
        for one in saved if isinstance(saved, (tuple, list)) else [saved]:
            if type(one) in (Tensor, torch.nn.Parameter):
                yield name, one


def _has_no_hooks(raw: object) -> bool:
    """Whether a tensor was saved as it is. Asked by giving it hooks that do nothing, the one way that torch offers."""
    try:
        raw.register_hooks(_itself, _itself)  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _is_result(name: str) -> bool:
    return name.removeprefix("_saved_").startswith(("result", "output", "total_weight"))


def name_of(node: Node) -> str:
    """What users call an operation: `AddmmBackward0` is "addmm"; a Function of the user's keeps its name."""
    bare = re.sub(r"Backward\d*$", "", node.name())
    if bare == node.name() or not node.name()[-1].isdigit():
        return bare
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower()
