"""Reads the graph of a loss: the order of parameters in the forward, and where it stopped being finite."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from amp_engine.stepping.reached import CHECKPOINT, leaf_of
from amp_engine.tools.diagnosis.saved_values import (
    EXPLAINED,
    NO_RESULT,
    STEEP,
    is_of_range,
    remade,
    why,
    why_divisor,
    why_mask,
    why_nothing,
    why_result,
    why_softmax,
)

# These operations only reshape or copy, so a value that is not finite never starts in them.
_PASSING = {"view", "unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "clone", "alias"}
_PASSING |= {"select", "slice", "split", "unbind", "as_strided", "reshape_alias"}
_COMPILED = "CompiledFunction"
# The largest number of operations that one search visits.
_SEARCHED = 64
# A -inf from the first of these is a mask, and the second of these accept such a mask.
_FILL_MASKS = {"masked_fill", "where"}
_TAKE_MASKS = {"logsumexp", "logaddexp", "log_sigmoid", "softplus"}
# The backward of these passes on each NaN of a gradient, even if it multiplies it by 0.
_SPREAD_NAN = {"mm", "bmm", "addmm", "baddbmm", "convolution"}
# The key, in a node's metadata, of the names of saved tensors that `_has_hooks` gave hooks.
_READ = "amp_engine.read"

Order = Mapping[int, tuple[int, int]]
CHECKPOINTED = 0
"""The key, in an Order, of the last reentrant checkpoint, which hides its parameters; no id is 0."""


class Region(NamedTuple):
    """Checkpointed operations, which are not in the graph.

    Attributes:
        before, after: ids of the last parameter used before them, and of the first used after them; None without any.
    """

    before: int | None
    after: int | None


class Origin(NamedTuple):
    """The place where a forward stopped being finite, as far as its graph shows.

    Attributes:
        operation: autograd's operation that gave the first value that is not finite, such as "softmax"; None if that
            value came from outside of the graph.
        took: the operation that took that value, if `operation` is None.
        parameter: id of a parameter that the operation used, or else of the last one used before it; None without any.
        is_parameter: True if the value from outside is that parameter itself.
        is_exact: True if all inputs of `operation` are known to be finite. An addition, for one, saves no inputs.
        why: "log of 0 in 36 of 40 elements", if the tensors that `operation` saved show it; else None.
        region: the checkpointed operations that may have given that value; None if there are none.
        memory: address of the value from outside, or 0.
    """

    operation: str | None
    took: str | None
    parameter: int | None
    is_parameter: bool
    is_exact: bool = True
    why: str | None = None
    region: Region | None = None
    memory: int = 0


def forward_order(loss: Tensor) -> dict[int, tuple[int, int]]:
    """Return two numbers for each parameter behind `loss`, by id: larger ones were last used later in the forward.

    The second number orders the parameters of one operation: a compiled model is one operation, to which torch.compile
    passes parameters in the order of their first use. Takes about a microsecond an operation. Works after the backward,
    too, which frees saved tensors but keeps the connections. No host sync.
    """
    order: dict[int, tuple[int, int]] = {}
    for node in _nodes(loss):
        number = node._sequence_nr()
        if node.name() == CHECKPOINT:
            order[CHECKPOINTED] = max(order.get(CHECKPOINTED, (0, 0)), (number, 0))
        for place, (following, _) in enumerate(node.next_functions):
            if (param := leaf_of(following)) is not None:
                order[id(param)] = max(order.get(id(param), (0, 0)), (number, place))
    return order


def origin_of_nonfinite(loss: Tensor) -> Origin | None:
    """Find the operation behind `loss` that gave the first value that is not finite, from tensors saved for backward.

    Call it before the backward. -inf alone counts only if nothing else is found: masks are made of it. Tensors saved
    through hooks, as activation checkpointing saves them, are skipped, since they may be read only once. A product
    whose result no operation saved, for instance because an addition followed, is computed again.
    Waits for the device, and reads all other saved tensors.

    Returns:
        None if the saved tensors do not show it, or if the first value may lie inside of a compiled function.
    """
    return _Search(loss).origin()


class _Search:
    """Reads the tensors that the operations behind a loss saved."""

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss
        self._nodes = sorted(_nodes(loss), key=lambda node: node._sequence_nr())
        read = {node: _saved(node) for node in self._nodes}
        self._saved = {node: saved for node, (saved, _) in read.items()}
        # Operations in checkpointed parts, and the nodes of reentrant checkpoints.
        self._hidden = {node for node, (_, has_hooks) in read.items() if has_hooks or node.name() == CHECKPOINT}
        self._finite: set[Node] = set()  # operations whose saved results are finite
        self._has_data: set[Node] = set()  # operations that saved a finite input from outside of the graph
        self._reasons: dict[Node, str] = {}  # operation with finite inputs -> why its result is not finite
        self._odd: list[tuple[Node, str, Tensor]] = []  # saved tensors that are not finite, in the order of the forward
        for node in self._nodes:
            nothing = why_nothing(node, name_of(node), dict(self._saved[node]))
            if nothing is not None:
                self._reasons[node] = nothing
            for name, saved in self._saved[node]:
                self._read(node, name, saved)
        self._odd.sort(key=lambda one: _when(one[0], one[2]))

    def _read(self, node: Node, name: str, saved: Tensor) -> None:
        if saved.is_floating_point() and not saved.isfinite().all():
            if saved.grad_fn is not None or saved.requires_grad or not _is_result(name):
                self._odd.append((node, name, saved))  # else it is a statistic, computed from the inputs
            return
        if (reason := why(NO_RESULT, node, name_of(node), name, saved.detach())) is not None:
            self._reasons.setdefault(node, reason)
        if saved.grad_fn is None:
            self._has_data.add(node)
        elif not _only_of_a_parameter(maker := _maker(saved.grad_fn)):
            self._finite.add(maker)

    def origin(self) -> Origin | None:
        compiled = min((node._sequence_nr() for node in self._nodes if name_of(node) == _COMPILED), default=math.inf)
        # -inf alone may be a mask.
        found = [one for one in self._odd if (one[2].isnan() | one[2].isposinf()).any()] or self._odd
        if found:
            node, _, saved = found[0]
            if _when(node, saved) < compiled:
                return self.origin_of(node, saved)
        if self._loss.grad_fn is None:
            return None
        maker = _maker(self._loss.grad_fn)
        behind = self._behind(maker)
        origin = self._made_in([one for one in behind if one._sequence_nr() <= compiled])
        if origin is None and not math.isfinite(compiled) and not self._hidden.isdisjoint(behind):
            return self._hidden_in(maker)
        return origin

    def origin_of(self, node: Node, saved: Tensor) -> Origin:
        """Return the origin of a value that is not finite, which `node` saved."""
        if saved.grad_fn is None:
            if saved.requires_grad:
                return Origin(None, name_of(node), id(saved), True)
            memory = saved.untyped_storage().data_ptr()
            return Origin(None, name_of(node), _parameter_near(self._loss, node), False, memory=memory)
        maker = _maker(saved.grad_fn)
        behind = self._behind(maker)
        if (given := self._given_minus_inf(behind)) is not None:
            return self.origin_of(*given)
        if (made := self._made_in(behind)) is not None:
            return made
        if not self._hidden.isdisjoint(behind):
            return self._hidden_in(maker)
        near, reason = _parameter_near(self._loss, maker), why_result(name_of(maker), saved.detach())
        masks = [tensor for one in behind for name, tensor in self._saved[one] if name == "_saved_mask"]
        mask = masks[0] if len(masks) == 1 else None
        if name_of(maker).endswith("softmax"):
            reason = why_softmax(maker, saved.detach(), mask)
        if reason is None and mask is not None:
            reason = why_mask(name_of(maker), saved.detach(), mask)
        is_exact = (
            reason is None
            and behind == [maker]
            and all(one is not None or maker in self._has_data for one, _ in maker.next_functions)
        )
        return Origin(name_of(maker), None, near, False, is_exact, reason)

    def _behind(self, maker: Node, through_hidden: bool = False) -> list[Node]:
        """Return `maker`, and the operations before it whose results are unknown."""
        found, seen = [maker], {maker}
        for node in found:  # grows in this loop
            is_end = node in self._hidden or name_of(node) == "convolution" or len(found) > _SEARCHED
            if is_end and not through_hidden:
                continue
            for following, _ in node.next_functions:
                one = None if following is None else _maker(following)
                if one is None or one in self._finite or leaf_of(one) is not None or _only_of_a_parameter(one):
                    continue
                if one not in seen:
                    seen.add(one)
                    found.append(one)
        return found

    def _given_minus_inf(self, behind: list[Node]) -> tuple[Node, Tensor] | None:
        """Return the first of these operations that has an input of -inf which is no mask, with that input."""
        for node, name, saved in self._odd:
            takes_it = node in behind and not _is_result(name) and name_of(node) not in _TAKE_MASKS
            if takes_it and (
                saved.grad_fn is None
                or not any(name_of(one) in _FILL_MASKS for one in self._behind(_maker(saved.grad_fn)))
            ):
                return node, saved
        return None

    def _made_in(self, behind: list[Node]) -> Origin | None:
        """Return the first of these operations that is known to have made a value that is not finite."""
        made = [one for one in behind if one in self._reasons or self._overflows(one)]
        if not made:
            return None
        maker = min(made, key=lambda one: one._sequence_nr())
        near = _parameter_near(self._loss, maker)
        return Origin(name_of(maker), None, near, False, why=self._reasons.get(maker))

    def _overflows(self, node: Node) -> bool:
        """True if the result of the operation, computed again from the tensors that it saved, is not finite."""
        result = remade(node, name_of(node), {name: saved.detach() for name, saved in self._saved[node]})
        return result is not None and not bool(result.isfinite().all())

    def _hidden_in(self, maker: Node) -> Origin:
        """Return the origin of a value that `maker` gave, in checkpointed parts or right after them."""
        inside = [one for one in self._behind(maker, through_hidden=True) if one in self._hidden]
        numbers = [one._sequence_nr() for one in inside]
        used: list[int] = []
        after = None
        for node in self._nodes:
            # Casts and views of parameters, which save nothing, may belong to the hidden operations.
            own = [one for one in parameters_of(node) if one not in used] if self._saved[node] else []
            if node._sequence_nr() < min(numbers):
                used += own
            elif node._sequence_nr() > max(numbers) and own:
                after = own[0]
                break
        before = used[-1] if used else None
        return Origin(name_of(maker), None, before, False, False, region=Region(before, after))

    def undefined(self) -> tuple[str | None, Origin | None]:
        """Find, in the order of the backward, the first cause that turns any gradient, even 0, into NaN."""
        own = [node for node in reversed(self._nodes) if node not in self._hidden and _is_of_torch(node)]
        reasons = {node: reason for node in own if (reason := self._reasons.get(node) or self._steep(node)) is not None}
        for node, name, saved in self._odd:
            if node in own and not (node in reasons and _is_result(name)) and _spoils(node):
                return None, self.origin_of(node, saved)
        # Squares beyond the range of their type are never meant, even if the loss hides them.
        sure = [reason for node, reason in reasons.items() if _spoils(node)]
        return next(iter([*sure, *filter(is_of_range, reasons.values())]), None), None

    def _steep(self, node: Node) -> str | None:
        """Name the values at which the derivative of this operation is not defined; None without any."""
        if (operation := name_of(node)) not in EXPLAINED:
            return None
        for name, saved in self._saved[node]:
            is_divisor = operation == "div" and name == "_saved_other"
            if is_divisor and _ends_in_float16(node) and (reason := why_divisor(saved.detach())) is not None:
                return reason
            if (reason := why(STEEP, node, operation, name, saved.detach())) is not None:
                return reason
            if _is_result(name) and (reason := why_result(operation, saved.detach())) is not None:
                return reason
        return None


def _ends_in_float16(node: Node) -> bool:
    """True if the gradient of the first input of `node`, which is not float16, is cast to float16."""
    following = node.next_functions[0][0]
    while following is not None and (name_of(following) == "cast" or name_of(following) in _PASSING):
        following = following.next_functions[0][0]
    if following is None:
        return False
    leaf = leaf_of(following)
    types = [one.dtype for one in following._input_metadata] if leaf is None else [leaf.dtype]
    return torch.float16 in types and node._input_metadata[0].dtype != torch.float16


def undefined_derivative(loss: Tensor) -> tuple[str | None, Origin | None]:
    """Find the cause that turns any gradient of a finite loss into NaN, at any scale.

    Call it before the backward. Waits for the device, and reads all saved tensors but those of checkpointed parts.

    Returns:
        First "sqrt of 0 in 3 of 4 elements" if a derivative is not defined, else None. Second the origin of a value of
        the forward that is not finite, and that the loss does not show, or None.
    """
    return _Search(loss).undefined()


def _is_of_torch(node: Node) -> bool:
    """True if the backward of this operation is one of torch's formulas, not of a user's Function or a collective."""
    return re.fullmatch(r"\w+Backward\d+", node.name()) is not None


@torch.no_grad()
def _spoils(node: Node) -> bool:
    """True if the backward of `node` turns a gradient of 0 into NaN, and no operation before it turns NaN into 0."""
    zeros = [torch.zeros(one.shape, dtype=one.dtype, device=one.device) for one in node._input_metadata]
    left: list[tuple[Node, Sequence[Tensor]]] = [(node, zeros)]
    for _ in range(_SEARCHED):
        if not left:
            return False
        node, grads = left.pop()
        if not all(_has_memory(saved) for _, saved in _tensors_of(node)[0]):
            return True  # the formula would read released memory
        try:
            gave = cast(Any, node)(*grads)
        except (RuntimeError, TypeError):  # the operation takes no such gradient
            return False
        for grad, (following, _) in zip(
            gave if isinstance(gave, tuple) else (gave,), node.next_functions, strict=False
        ):
            if following is None or grad is None or bool(grad.isfinite().all()):
                continue
            is_end = leaf_of(following) is not None or name_of(following) in _SPREAD_NAN or not _is_of_torch(following)
            if is_end or len(following._input_metadata) != 1 or _saved(following)[1]:
                return True
            left.append((following, [grad]))
    return True


def _when(node: Node, saved: Tensor) -> float:
    """Return the number of the operation that made a tensor which `node` saved; if none did, right before `node`'s."""
    return node._sequence_nr() - 0.5 if saved.grad_fn is None else _maker(saved.grad_fn)._sequence_nr()


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


def _parameter_near(loss: Tensor, node: Node) -> int | None:
    """Return the id of a parameter that `node` uses, also as view or cast; if none, of the last one used before it."""
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
    """Return names and tensors that `node` saved and that can be read, and True if it saved others through hooks."""
    found, has_hooks = _tensors_of(node)
    return [(name, saved) for name, saved in found if _has_memory(saved)], has_hooks


def _tensors_of(node: Node) -> tuple[list[tuple[str, Tensor]], bool]:
    """Return names and tensors that `node` saved for the backward, and True if it saved others through hooks."""
    found: list[tuple[str, Tensor]] = []
    has_hooks = False
    # Kept in the graph, since another loss may share a part of it.
    read = cast(Any, node).metadata.setdefault(_READ, set())
    for raw_name in dir(node):
        if not raw_name.startswith("_raw_saved_"):
            continue
        name = "saved_tensors" if node.name() == CHECKPOINT else raw_name.removeprefix("_raw")
        try:
            raw = getattr(node, raw_name)
            if raw_name not in read and any(
                _has_hooks(one) for one in (raw if isinstance(raw, (tuple, list)) else [raw])
            ):
                has_hooks = True
                continue
            read.add(raw_name)
            saved = getattr(node, name, None)
        except (RuntimeError, TypeError):  # freed by an earlier backward: torch calls `_itself` without a tensor
            continue
        for one in saved if isinstance(saved, (tuple, list)) else [saved]:
            if isinstance(one, Tensor) and type(one) in (Tensor, torch.nn.Parameter):
                found.append((name, one))
    return found, has_hooks


def _has_memory(tensor: Tensor) -> bool:
    """True unless the memory was released, as FSDP does for gathered weights between forward and backward."""
    return tensor.layout is not torch.strided or not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def saved_by(node: Node) -> list[Tensor]:
    """Return the tensors that `node` saved for the backward, except those that it saved through hooks."""
    return [saved for _, saved in _saved(node)[0]]


def _has_hooks(raw: object) -> bool:
    """True if a tensor was saved through hooks. Gives it hooks that do nothing: torch refuses a second pair."""
    try:
        raw.register_hooks(_itself, _itself)  # type: ignore[attr-defined]
    except RuntimeError as error:  # None and freed tensors raise it, too
        return "already been set" in str(error)
    return False


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _is_result(name: str) -> bool:
    return name.removeprefix("_saved_").startswith(("result", "output", "total_weight", "running"))


def name_of(node: Node) -> str:
    """Return the name of an operation that users know: "max_pool2d_with_indices" for `MaxPool2DWithIndicesBackward0`.

    A user's Function keeps its name.
    """
    bare = re.sub(r"Backward\d*$", "", node.name())
    if bare == node.name() or not node.name()[-1].isdigit():
        return bare
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[0-9][A-Z])(?=[A-Z][a-z])", "_", bare).lower()
    return "cast" if name == "to_copy" else name
