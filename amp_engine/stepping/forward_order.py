"""Reads the graph of a loss: the order of parameters in the forward, and where it stopped being finite."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

# These operations only reshape or copy, so a value that is not finite never starts in them.
_PASSING = {"view", "unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "clone", "alias"}
_PASSING |= {"select", "slice", "split", "unbind", "as_strided", "reshape_alias"}
_COMPILED = "CompiledFunction"

Order = Mapping[int, tuple[int, int]]


class Origin(NamedTuple):
    """The place where a forward stopped being finite, as far as its graph tells.

    Attributes:
        operation: autograd's operation that gave the first value that is not finite, such as "softmax"; None if that
            value came from outside of the graph.
        took: the operation that took that value, if `operation` is None.
        parameter: id of a parameter that the operation used, or else of the last one used before it; None without any.
        is_parameter: True if the value from outside is that parameter itself.
        is_exact: True if all inputs of `operation` are known to be finite. An addition, say, saves no inputs.
        why: "log of 0 in 36 of 40 elements", where finite inputs of `operation` tell; None elsewhere.
    """

    operation: str | None
    took: str | None
    parameter: int | None
    is_parameter: bool
    is_exact: bool = True
    why: str | None = None


def forward_order(loss: Tensor) -> dict[int, tuple[int, int]]:
    """Return two numbers for each parameter behind `loss`, by id: larger ones were last used later in the forward.

    The second number orders the parameters of one operation: a compiled model is one operation, to which torch.compile
    passes parameters in the order of their first use. Takes about a microsecond an operation. Works after the backward,
    too, which frees saved tensors but keeps the connections. No host sync.
    """
    order: dict[int, tuple[int, int]] = {}
    for node in _nodes(loss):
        number = node._sequence_nr()
        for place, (following, _) in enumerate(node.next_functions):
            if (param := leaf_of(following)) is not None:
                order[id(param)] = max(order.get(id(param), (0, 0)), (number, place))
    return order


def origin_of_nonfinite(loss: Tensor) -> Origin | None:
    """Find the operation behind `loss` that gave the first value that is not finite, from tensors saved for backward.

    Call it before the backward. -inf alone counts only if nothing else is found: masks are made of it. Tensors saved
    through hooks, as activation checkpointing saves them, are skipped, since they may be read only once.
    Waits for the device, and reads all other saved tensors.

    Returns:
        None if no saved tensor tells, or if the first value may lie inside of a compiled function.
    """
    nodes = sorted(_nodes(loss), key=lambda node: node._sequence_nr())
    compiled = min((node._sequence_nr() for node in nodes if name_of(node) == _COMPILED), default=math.inf)
    found: dict[bool, tuple[float, Node, Tensor]] = {}  # the earliest, keyed by True for -inf alone
    finite: set[Node] = set()  # operations whose saved results are finite
    has_data: set[Node] = set()  # operations that saved a finite input from outside of the graph
    told: list[tuple[Node, str]] = []  # operations whose finite inputs tell, in order
    for node in nodes:
        for name, saved in _saved(node):
            if not saved.is_floating_point() or saved.isfinite().all():
                if (why := _why(_NO_RESULT, name_of(node), name, saved.detach())) is not None:
                    told.append((node, why))
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
    origin: Origin | None = None
    before = compiled  # a value that is not finite comes from before it
    if found:
        when, node, saved = found[min(found)]
        if when < compiled:
            before = when
            origin = _origin(loss, node, saved, finite, has_data)
    if told and told[0][0]._sequence_nr() < before and not (origin is not None and origin.is_exact):
        node, why = told[0]
        return Origin(name_of(node), None, _parameter_near(loss, node), False, why=why)
    return origin


def _origin(loss: Tensor, node: Node, saved: Tensor, finite: set[Node], has_data: set[Node]) -> Origin:
    """Return the origin of a value that is not finite, which `node` saved."""
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


def undefined_derivative(loss: Tensor) -> str | None:
    """Explain which derivative behind `loss` is inf or NaN, if a saved tensor tells: "sqrt of 0 in 3 of 4 elements".

    Call it before the backward. Waits for the device, and reads the saved tensors of a few operations.
    """
    nodes = (node for node in _nodes(loss) if name_of(node) in _STEEP)
    found = (_why(_STEEP, name_of(node), name, saved.detach()) for node in nodes for name, saved in _saved(node))
    return next(filter(None, found), None)


# Operation -> one of its saved tensors, and values of it, in words.
_Values = Mapping[str, tuple[str, list[tuple[Callable[[Tensor], Tensor], str]]]]
_LOG = "self", [(lambda x: x == 0, "of 0"), (lambda x: x < 0, "of negative numbers")]
_NO_RESULT: _Values = {  # whose results are not finite there
    **dict.fromkeys(["log", "log2", "log10"], _LOG),
    "log1p": ("self", [(lambda x: x == -1, "of -1"), (lambda x: x < -1, "of numbers below -1")]),
    "div": ("other", [(lambda x: x == 0, "by 0")]),
}
_STEEP: _Values = {  # whose results are finite there, and whose derivatives are not
    "sqrt": ("result", [(lambda x: x == 0, "of 0")]),
    **dict.fromkeys(["asin", "acos"], ("self", [(lambda x: x.abs() == 1, "of 1 or -1")])),
}


def _why(values: _Values, operation: str, name: str, saved: Tensor) -> str | None:
    """Name the values in this saved tensor that are among `values` of the operation; None without any."""
    which, kinds = values.get(operation, ("", []))
    if name == f"_saved_{which}":
        for is_it, kind in kinds:
            if count := int(is_it(saved).sum()):
                return f"{operation} {kind} in {count} of {saved.numel()} elements"
    return None


def _is_known(node: Node | None, finite: set[Node], has_data: bool) -> bool:
    """True if the result of `node`, or data if it is None, is known to be finite."""
    if node is None:
        return has_data
    maker = _maker(node)
    return maker in finite or leaf_of(maker) is not None or _only_of_a_parameter(maker)


def _only_of_a_parameter(node: Node) -> bool:
    """True if the result of `node` is a view or a cast of a parameter."""
    while len(node.next_functions) == 1 and (before := node.next_functions[0][0]) is not None:
        if leaf_of(before) is not None:
            return name_of(node) in _PASSING or name_of(node) == "to_copy"
        node = before
    return False


def _nodes(loss: Tensor) -> Iterator[Node]:
    """Yield every operation behind `loss` once."""
    seen: set[object] = set()
    left = [] if loss.grad_fn is None else [loss.grad_fn]
    while left:
        node = left.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen and leaf_of(following) is None:
                seen.add(following)
                left.append(following)


def _maker(node: Node) -> Node:
    """Return the operation that computed the values of `node`, behind operations that only reshape."""
    while name_of(node) in _PASSING and node.next_functions:
        before = node.next_functions[0][0]
        if before is None or leaf_of(before) is not None:
            break
        node = before
    return node


def leaf_of(node: Node | None) -> Tensor | None:
    """Return the parameter whose gradient `node` accumulates, or None."""
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def _parameter_near(loss: Tensor, node: Node) -> int | None:
    """Return the id of a parameter that `node` uses, also as view or cast, or else of the last one used before it."""
    order = forward_order(loss)
    own = parameters_of(node)
    earlier = own or [param for param, (number, _) in order.items() if number <= node._sequence_nr()]
    return max(earlier, key=order.__getitem__, default=None)


def parameters_of(node: Node) -> list[int]:
    """Return the ids of the parameters that an operation uses, directly or through views and casts."""
    return [id(p) for following in _around(node) if (p := leaf_of(following)) is not None]


def _around(node: Node) -> Iterator[Node]:
    """Yield the inputs of `node`, followed through chains of operations with one input."""
    for following, _ in node.next_functions:
        while following is not None and len(following.next_functions) == 1 and leaf_of(following) is None:
            only = following.next_functions[0][0]
            if only is None or len(only.next_functions) > 1:
                break
            following = only
        if following is not None:
            yield following


def _saved(node: Node) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors that `node` saved for the backward, without those saved through hooks."""
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
    """True if a tensor was saved without hooks. Gives it hooks that do nothing: torch refuses a second pair."""
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
    """Return the users' name of an operation: "max_pool2d_with_indices" for `MaxPool2DWithIndicesBackward0`.

    A user's Function keeps its name.
    """
    bare = re.sub(r"Backward\d*$", "", node.name())
    if bare == node.name() or not node.name()[-1].isdigit():
        return bare
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[0-9][A-Z])(?=[A-Z][a-z])", "_", bare).lower()
