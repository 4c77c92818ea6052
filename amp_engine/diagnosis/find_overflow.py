"""`amp.find_overflow`: one batch once more, with every operation looked at."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from amp_engine.diagnosis.post_mortem import Place
from amp_engine.diagnosis.recorder import Module, Recorder, tensors_in
from amp_engine.diagnosis.rehearsal import rehearse
from amp_engine.diagnosis.relative_error import stored
from amp_engine.errors import AmpStateError
from amp_engine.ground.distributed import local_of
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.forward_order import name_of, parameters_of
from amp_engine.stepping.scale_loss import ScaledBackwards

Phase = Literal["weights", "data", "forward", "backward"]

# What they give is not written yet.
_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_"}
# -inf of these is a mask.
_FILLS = {"fill", "fill_", "full", "full_like", "new_full", "masked_fill", "masked_fill_", "where", "scalar_tensor"}
_FILLS |= {"lift_fresh", "_to_copy", "copy_", "triu", "tril"}


@dataclass(frozen=True)
class OverflowSource:
    """Where a batch stopped to be finite.

    Attributes:
        phase: "weights": before the batch, in a parameter; "data": in an input of the model, or of an operation;
            "forward", "backward": in the operation named; None: everything was finite.
        module: name of the module that the operation is in, or that was given the data; "" for the model itself; None
            outside of every module of the models that were initialized, as in a loss function.
        module_type: class of that module.
        operation: "softmax", by the name that torch gives it in the forward, or autograd in the backward; "a sum of
            gradients, or a hook, before ..." names the operation whose backward was given what is not finite.
        parameter: name of a parameter that the operation uses, if it does.
        kind: "inf" or "nan".
        elements: how many were not finite.
        numel: of how many; of a sparse tensor those that it stores.
        dtype: of the result.
        largest_input: largest finite magnitude among the inputs of the operation; None where it has no number.
        loss: before scaling; None if it was never seen.
        loss_scale: that the loss was multiplied by; None if it was never seen.
        finite_at: the present loss scale, if the batch was run at an earlier one and overflows at the present one no
            more; None else.
    """

    phase: Phase | None
    module: str | None = None
    module_type: str | None = None
    operation: str | None = None
    parameter: str | None = None
    kind: Literal["inf", "nan"] | None = None
    elements: int = 0
    numel: int = 0
    dtype: torch.dtype | None = None
    largest_input: float | None = None
    loss: float | None = None
    loss_scale: float | None = None
    finite_at: float | None = None

    def __str__(self) -> str:
        loss = "" if self.loss is None else f"  The loss is {self.loss:.6g}, scaled by {self.loss_scale:g}."
        if self.phase is None:
            return f"Everything is finite: each operation of the forward, and each gradient.{loss}"
        where = self._where()
        found = f"{self.kind} in {self.elements} of {self.numel} elements ({str(self.dtype).removeprefix('torch.')})"
        if self.phase == "weights":
            return f"weights: {self.parameter} holds {found}.{loss}"
        if self.phase == "data":
            return f"data: {where} was given {found}, which no operation of this batch made.{loss}"
        inputs = "" if self.largest_input is None else f", of inputs up to {self.largest_input:.4g}"
        now = ""
        if self.finite_at is not None:
            now = f"  At the present scale, {self.finite_at:g}, everything is finite: nothing to do."
        return f"{self.phase}: {where} gave the first value that is not finite: {found}{inputs}.{loss}{now}"

    def _where(self) -> str:
        of = f" with {self.parameter}" if self.parameter else ""
        if self.module is None:
            return f"{self.operation}{of}, outside of the modules of the model,"
        module = f"{self.module} ({self.module_type})" if self.module else f"the model itself ({self.module_type})"
        return module if self.operation is None else f"{self.operation}{of} in {module}"


class _Search(Recorder):
    """Looks at each operation of a forward, and by hooks at each node of a backward, until something is not finite."""

    sees_operations = True

    def __init__(self, models: Sequence[nn.Module], places: Mapping[int, Place]) -> None:
        super().__init__(models)
        self.loss: Tensor | None = None
        self.scale = 1.0  # of this loss
        self.has_gradient = False
        self._places = places
        self._owner: dict[Node, Module | None] = {}  # the module that made each node
        self._found: OverflowSource | None = None
        self._maybe: OverflowSource | None = None  # -inf of a cast, which may be a mask
        # Memory that was not written when it was made, so that its values were never computed. Alive, so that no other
        # is taken for it.
        self._unwritten: dict[int, torch.UntypedStorage] = {}

    @property
    def found(self) -> OverflowSource:
        """The first place that is sure, or else the first that may be a mask; and the loss."""
        found = self._found or self._maybe or OverflowSource(None)
        if self.loss is None:
            return found
        return dataclasses.replace(found, loss=float(self.loss.float().sum()), loss_scale=self.scale)

    def look_at_weights(self, params: Iterable[nn.Parameter]) -> None:
        """Note the first parameter that is not finite."""
        for param in params:
            if (bad := self._first_bad([param])) is not None:
                place = self._places[id(param)]
                self._note("weights", bad, Module(place.module, place.module_type), parameter=place.parameter)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note an operation with an input, or a result, that is not finite."""
        if self._found is not None:
            return func(*args, **kwargs)
        given = self._written(tensors_in((args, kwargs)))
        came_bad = [one for one in given if _is_bad(one)]
        has_masks = any(bool(one.isneginf().any()) for one in given)
        largest = _largest(given)
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _UNWRITTEN:
            for one in map(local_of, tensors_in(result)):
                if one.layout is not torch.strided:
                    continue
                storage = one.untyped_storage()
                self._unwritten[storage._cdata] = storage
            return result
        if came_bad:  # what operations before have made was found then
            self._note("data", came_bad[0], self.innermost, name)
            return result
        for one in self._written(tensors_in(result)):
            only_minus = not _is_bad(one)
            if only_minus and (has_masks or not bool(one.isneginf().any()) or (name in _FILLS and name != "_to_copy")):
                continue
            is_sure = not (only_minus and name in _FILLS)
            self._note("forward", one, self.innermost, name, largest=largest, is_sure=is_sure)
            break
        return result

    def _written(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The floating ones whose memory was not made unwritten."""
        return [one for one in _floats(tensors) if one.untyped_storage()._cdata not in self._unwritten]

    def given(self, module: Module, tensors: Sequence[Tensor]) -> None:
        """Look at the inputs of a model."""
        self._claim(tensors)
        if self.innermost is not None:
            return
        with self.paused():
            for one in _floats(tensors):
                if self._found is None and _is_bad(one):
                    self._note("data", one, Module("", module.type))
        self.is_paused = False

    def gave(self, module: Module, tensors: Sequence[Tensor]) -> None:
        """Watch the backward of the outputs of a model."""
        self._claim(tensors)
        if len(self.running) <= 1:
            self._watch_backward()

    def before_backward(self, context: object, loss: Tensor, scale: Tensor | float) -> None:
        """Watch the backward of a loss that is scaled."""
        self.loss, self.scale = loss.detach(), float(scale)
        self.was_backward = True
        self.has_gradient |= loss.is_leaf and loss.requires_grad  # which has no node that could be watched
        self.is_paused = True
        self.running.clear()
        self._claim([loss])
        self._watch_backward()

    def end(self) -> None:
        """Let go of the graph."""
        super().end()
        self._owner.clear()

    def _claim(self, tensors: Sequence[Tensor]) -> None:
        """Note that the module that is being run made these tensors, as far as nodes behind them are new."""
        left: list[Node | None] = [tensor.grad_fn for tensor in tensors]
        while left:
            node = left.pop()
            if node is not None and node not in self._owner:
                self._owner[node] = self.innermost
                left += [following for following, _ in node.next_functions]

    def _watch_backward(self) -> None:
        """Have each node that was claimed looked at when its backward is run."""
        watched = len(self.handles) // 2
        for node in list(self._owner)[watched:]:
            self.handles.append(node.register_prehook(lambda grads, node=node: self._arrives(node, grads)))
            self.handles.append(node.register_hook(lambda gave, took, node=node: self._gives(node, gave, took)))

    def _arrives(self, node: Node, grads: Sequence[Tensor | None]) -> None:
        self.was_backward = self.has_gradient = True
        if (bad := self._first_bad(grads)) is not None:
            self._note_backward(node, bad, f"a sum of gradients, or a hook, before {name_of(node)}", None)

    def _gives(self, node: Node, gave: Sequence[Tensor | None], took: Sequence[Tensor | None]) -> None:
        if (bad := self._first_bad(gave)) is not None:
            self._note_backward(node, bad, name_of(node), _largest(_floats(took)))

    def _first_bad(self, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """The first that is not finite; None once something was found."""
        looked_at = _floats(tensors) if self._found is None else ()
        return next((one for one in looked_at if not bool(one.isfinite().all())), None)

    def _note_backward(self, node: Node, tensor: Tensor, operation: str, largest: float | None) -> None:
        own = [self._places[i].parameter for i in parameters_of(node) if i in self._places]
        module = self._owner.get(node) or self.innermost
        self._note("backward", tensor, module, operation, own[-1] if own else None, largest)

    def _note(
        self,
        phase: Phase,
        tensor: Tensor,
        module: Module | None,
        operation: str | None = None,
        parameter: str | None = None,
        largest: float | None = None,
        is_sure: bool = True,
    ) -> None:
        source = OverflowSource(
            phase=phase,
            module=None if module is None else module.name,
            module_type=None if module is None else module.type,
            operation=operation,
            parameter=parameter,
            kind="nan" if bool(tensor.isnan().any()) else "inf",
            elements=int((~tensor.isfinite()).sum()),
            numel=tensor.numel(),
            dtype=tensor.dtype,
            largest_input=largest,
        )
        if is_sure:
            self._found = source
        elif self._maybe is None:
            self._maybe = source


def find_overflow(
    step_fn: Callable[[], Any],
    models: Sequence[nn.Module],
    backwards: ScaledBackwards,
    scalers: Sequence[LossScaler],
    places: Mapping[int, Place],
    loss_scale: float | None,
) -> OverflowSource:
    """Run one batch once more, at a loss scale if it is given, and find where it stopped to be finite."""
    search = _Search(models, places)
    search.look_at_weights(p for model in models for p in model.parameters())
    rehearse(search, "find_overflow", step_fn, models, backwards, scalers, loss_scale)
    if search.found.phase is None and not search.has_gradient:
        raise AmpStateError(
            "find_overflow() saw no gradient, and nothing that is not finite before: the function neither ran a "
            "backward nor returned a loss that has one.  Call amp.find_overflow(lambda: loss_fn(model(x), y))."
        )
    return search.found


def _floats(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The values of floating tensors on this rank; of sparse ones, those that are stored."""
    found = [local_of(one.detach()) for one in tensors if one is not None and one.is_floating_point()]
    return [one for one in map(stored, found) if one.numel()]


def _is_bad(tensor: Tensor) -> bool:
    """True if it holds a NaN or +inf. -inf may be a mask."""
    return bool((tensor.isnan() | tensor.isposinf()).any())


def _largest(tensors: Sequence[Tensor]) -> float | None:
    """The largest finite magnitude."""
    found = [float(one[one.isfinite()].abs().max()) for one in tensors if bool(one.isfinite().any())]
    return max((one for one in found if math.isfinite(one)), default=None)
