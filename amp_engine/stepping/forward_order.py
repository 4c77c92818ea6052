"""Reads the graph of a loss: the order of parameters in the forward, and where it stopped being finite."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from amp_engine.stepping.saved_values import EXPLAINED, NO_RESULT, STEEP, remade, why, why_result, why_softmax

# These operations only reshape or copy, so a value that is not finite never starts in them.
_PASSING = {"view", "unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "clone", "alias"}
_PASSING |= {"select", "slice", "split", "unbind", "as_strided", "reshape_alias"}
_COMPILED = "CompiledFunction"
_CHECKPOINT = "CheckpointFunctionBackward"
# How many operations are looked at, in search of the one behind those of which nothing was kept.
_SEARCHED = 64

Order = Mapping[int, tuple[int, int]]
CHECKPOINTED = 0
"""The key, in an order, of the last part that a reentrant checkpoint hides with its parameters; no id is 0."""


class Region(NamedTuple):
    """Checkpointed operations, of which the graph has nothing.

    Attributes:
        before, after: ids of the last parameter used before them, and of the first one behind; None without any.
        part: number of the checkpoint that gave the first value that is not finite, from 1, and
        parts: how many there are; both 0 where the graph does not tell.
    """

    before: int | None
    after: int | None
    part: int = 0
    parts: int = 0


class Origin(NamedTuple):
    """The place where a forward stopped being finite, as far as its graph tells.

    Attributes:
        operation: autograd's operation that gave the first value that is not finite, such as "softmax"; None if that
            value came from outside of the graph.
        took: the operation that took that value, if `operation` is None.
        parameter: id of a parameter that the operation used, or else of the last one used before it; None without any.
        is_parameter: True if the value from outside is that parameter itself.
        is_exact: True if all inputs of `operation` are known to be finite. An addition, say, saves no inputs.
        why: "log of 0 in 36 of 40 elements", where what `operation` saved tells; None elsewhere.
        region: the checkpointed operations that it may lie in; None where it lies in none.
    """

    operation: str | None
    took: str | None
    parameter: int | None
    is_parameter: bool
    is_exact: bool = True
    why: str | None = None
    region: Region | None = None


def forward_order(loss: Tensor) -> dict[int, tuple[int, int]]:
    """Return two numbers for each parameter behind `loss`, by id: larger ones were last used later in the forward.

    The second number orders the parameters of one operation: a compiled model is one operation, to which torch.compile
    passes parameters in the order of their first use. Takes about a microsecond an operation. Works after the backward,
    too, which frees saved tensors but keeps the connections. No host sync.
    """
    order: dict[int, tuple[int, int]] = {}
    for node in _nodes(loss):
        number = node._sequence_nr()
        if node.name() == _CHECKPOINT:
            order[CHECKPOINTED] = max(order.get(CHECKPOINTED, (0, 0)), (number, 0))
        for place, (following, _) in enumerate(node.next_functions):
            if (param := leaf_of(following)) is not None:
                order[id(param)] = max(order.get(id(param), (0, 0)), (number, place))
    return order


def origin_of_nonfinite(loss: Tensor) -> Origin | None:
    """Find the operation behind `loss` that gave the first value that is not finite, from tensors saved for backward.

    Call it before the backward. -inf alone counts only if nothing else is found: masks are made of it. Tensors saved
    through hooks, as activation checkpointing saves them, are skipped, since they may be read only once. Products of
    which an addition, say, kept nothing are made once more.
    Waits for the device, and reads all other saved tensors.

    Returns:
        None if no saved tensor tells, or if the first value may lie inside of a compiled function.
    """
    return _Search(loss).origin()


class _Search:
    """Reads what the operations behind a loss saved, once: a second time torch refuses."""

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss
        self._nodes = sorted(_nodes(loss), key=lambda node: node._sequence_nr())
        read = {node: _saved(node) for node in self._nodes}
        self._saved = {node: saved for node, (saved, _) in read.items()}
        self._hidden = {node for node, (_, has_hooks) in read.items() if has_hooks}
        self._finite: set[Node] = set()  # operations whose saved results are finite
        self._has_data: set[Node] = set()  # operations that saved a finite input from outside of the graph

    def origin(self) -> Origin | None:
        compiled = min((node._sequence_nr() for node in self._nodes if name_of(node) == _COMPILED), default=math.inf)
        found: dict[bool, tuple[float, Node, Tensor]] = {}  # the earliest, keyed by True for -inf alone
        told: list[tuple[Node, str]] = []  # operations whose finite inputs tell, in order
        for node in self._nodes:
            for name, saved in self._saved[node]:
                if not saved.is_floating_point() or saved.isfinite().all():
                    if (reason := why(NO_RESULT, node, name_of(node), name, saved.detach())) is not None:
                        told.append((node, reason))
                    if saved.grad_fn is None:
                        self._has_data.add(node)
                    else:
                        self._finite.add(_maker(saved.grad_fn))
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
                origin = self._origin(node, saved)
        if told and told[0][0]._sequence_nr() <= before and not (origin is not None and origin.is_exact):
            node, reason = told[0]
            return Origin(name_of(node), None, _parameter_near(self._loss, node), False, why=reason)
        return origin

    def _origin(self, node: Node, saved: Tensor) -> Origin:
        """Return the origin of a value that is not finite, which `node` saved."""
        if saved.grad_fn is None:
            if saved.requires_grad:
                return Origin(None, name_of(node), id(saved), True)
            return Origin(None, name_of(node), _parameter_near(self._loss, node), False)
        maker = _maker(saved.grad_fn)
        if maker.name() == _CHECKPOINT:
            return self._hidden_in(maker, [one for one in self._nodes if one.name() == _CHECKPOINT])
        behind = self._behind(maker)
        made = [one for one in behind if self._overflows(one)]
        if made:
            maker = min(made, key=lambda one: one._sequence_nr())
            return Origin(name_of(maker), None, _parameter_near(self._loss, maker), False)
        if not self._hidden.isdisjoint(behind):
            return self._hidden_in(maker)
        near, reason = _parameter_near(self._loss, maker), why_result(name_of(maker), saved.detach())
        if name_of(maker).endswith("softmax"):
            masks = [tensor for one in behind for name, tensor in self._saved[one] if name == "_saved_mask"]
            reason = why_softmax(maker, saved.detach(), masks[0] if len(masks) == 1 else None)
        is_exact = (
            reason is None
            and behind == [maker]
            and all(one is not None or maker in self._has_data for one, _ in maker.next_functions)
        )
        return Origin(name_of(maker), None, near, False, is_exact, reason)

    def _behind(self, maker: Node) -> list[Node]:
        """Return `maker`, and the operations before it of whose results nothing is known."""
        found = [maker]
        for node in found:  # which grows
            if node in self._hidden or name_of(node) in ("convolution",) or len(found) > _SEARCHED:
                continue
            for following, _ in node.next_functions:
                one = None if following is None else _maker(following)
                if one is None or one in self._finite or leaf_of(one) is not None or _only_of_a_parameter(one):
                    continue
                if one not in found:
                    found.append(one)
        return found

    def _overflows(self, node: Node) -> bool:
        """True if the operation gives something that is not finite, made once more of what it saved."""
        result = remade(node, name_of(node), {name: saved.detach() for name, saved in self._saved[node]})
        return result is not None and not bool(result.isfinite().all())

    def _hidden_in(self, maker: Node, checkpoints: list[Node] | None = None) -> Origin:
        """Return the origin of a value that `maker` gave, in or right behind a checkpointed part."""
        last = maker._sequence_nr()
        since = max((one._sequence_nr() for one in self._finite if one._sequence_nr() < last), default=-1)
        hidden = [one._sequence_nr() for one in checkpoints or self._hidden]
        inside = [one for one in hidden if since < one <= last] or [last]
        used: list[int] = []
        after = None
        for node in self._nodes:
            # Casts and views of parameters, which save nothing, may belong to the hidden ones.
            own = [one for one in parameters_of(node) if one not in used] if self._saved[node] else []
            if node._sequence_nr() < min(inside):
                used += own
            elif node._sequence_nr() > max(inside) and own:
                after = own[0]
                break
        before = used[-1] if used else None
        part = checkpoints.index(maker) + 1 if checkpoints else 0
        region = Region(before, after, part, len(checkpoints or ()))
        return Origin(name_of(maker), None, before, False, False, region=region)


def undefined_derivative(loss: Tensor) -> str | None:
    """Explain which derivative behind `loss` is inf or NaN, if a saved tensor tells: "sqrt of 0 in 3 of 4 elements".

    Call it before the backward. Waits for the device, and reads the saved tensors of a few operations.
    """
    for node in _nodes(loss):
        if (operation := name_of(node)) in EXPLAINED:
            for name, saved in _saved(node)[0]:
                for values in (STEEP, NO_RESULT):
                    if (reason := why(values, node, operation, name, saved.detach())) is not None:
                        return reason
                if _is_result(name) and (reason := why_result(operation, saved.detach())) is not None:
                    return reason
    return None


def _only_of_a_parameter(node: Node) -> bool:
    """True if the result of `node` is a view or a cast of a parameter."""
    while len(node.next_functions) == 1 and (before := node.next_functions[0][0]) is not None:
        if leaf_of(before) is not None:
            return name_of(node) in _PASSING or name_of(node) == "cast"
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


def _saved(node: Node) -> tuple[list[tuple[str, Tensor]], bool]:
    """Return names and tensors that `node` saved for the backward, and True if it saved others through hooks."""
    found: list[tuple[str, Tensor]] = []
    has_hooks = False
    for raw_name in dir(node):
        if not raw_name.startswith("_raw_saved_"):
            continue
        name = "saved_tensors" if node.name() == _CHECKPOINT else raw_name.removeprefix("_raw")
        try:
            raw = getattr(node, raw_name)
            if any(_has_hooks(one) for one in (raw if isinstance(raw, (tuple, list)) else [raw])):
                has_hooks = True
                continue
            saved = getattr(node, name, None)
        except RuntimeError:  # freed by an earlier backward
            continue
        for one in saved if isinstance(saved, (tuple, list)) else [saved]:
            if isinstance(one, Tensor) and type(one) in (Tensor, torch.nn.Parameter):
                found.append((name, one))
    return found, has_hooks


def _has_hooks(raw: object) -> bool:
    """True if a tensor was saved through hooks. Gives it hooks that do nothing: torch refuses a second pair."""
    try:
        raw.register_hooks(_itself, _itself)  # type: ignore[attr-defined]
    except RuntimeError as error:  # which None raises as well, and what is freed
        return "already been set" in str(error)
    return False


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _is_result(name: str) -> bool:
    return name.removeprefix("_saved_").startswith(("result", "output", "total_weight", "running"))


def name_of(node: Node) -> str:
    """Return the users' name of an operation: "max_pool2d_with_indices" for `MaxPool2DWithIndicesBackward0`.

    A user's Function keeps its name.
    """
    bare = re.sub(r"Backward\d*$", "", node.name())
    if bare == node.name() or not node.name()[-1].isdigit():
        return bare
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[0-9][A-Z])(?=[A-Z][a-z])", "_", bare).lower()
    return "cast" if name == "to_copy" else name
