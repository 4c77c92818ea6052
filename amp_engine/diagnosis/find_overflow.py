"""`amp.find_overflow`: one batch once more, with every operation looked at."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from amp_engine.diagnosis.module_names import Module, ModuleNames, tensors_in
from amp_engine.diagnosis.post_mortem import Place
from amp_engine.diagnosis.rehearsal import check_callable, check_shapes, rehearsal
from amp_engine.diagnosis.relative_error import stored
from amp_engine.errors import AmpStateError
from amp_engine.ground.distributed import local_of
from amp_engine.ground.torch_private import DispatchMode, is_in_backward
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.forward_order import name_of, parameters_of
from amp_engine.stepping.scaled_backwards import ScaledBackwards

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
        phase: "weights": before the batch, in a parameter; "data": in what the model, or an operation, was given;
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
        largest_input: largest finite magnitude among what the operation was given; None where it was given no number.
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
        now = "" if self.finite_at is None else f"  At the present scale, {self.finite_at:g}, everything is finite: "
        now += "" if self.finite_at is None else "nothing to do."
        return f"{self.phase}: {where} gave the first value that is not finite: {found}{inputs}.{loss}{now}"

    def _where(self) -> str:
        of = f" with {self.parameter}" if self.parameter else ""
        if self.module is None:
            return f"{self.operation}{of}, outside of the modules of the model,"
        module = f"{self.module} ({self.module_type})" if self.module else f"the model itself ({self.module_type})"
        return f"{module}" if self.operation is None else f"{self.operation}{of} in {module}"


class _Recording(DispatchMode):
    """Looks at each operation of a forward, and by hooks at each node of a backward, until something is not finite."""

    def __init__(self, places: Mapping[int, Place]) -> None:
        super().__init__()
        self.names = ModuleNames()
        self.loss: Tensor | None = None
        self.scale = 1.0  # of this loss
        self.was_backward = False  # or one was announced by a `scale_loss`
        self.has_gradient = False
        self._places = places
        self._is_forward = True
        self._is_looking = False  # so that an operation is ours
        self._found: OverflowSource | None = None
        self._maybe: OverflowSource | None = None  # -inf of a cast, which may be a mask
        self._handles: list[Any] = []
        # Memory that was not written when it was made, so that nobody has computed what is in there. Alive, so that no
        # other is taken for it.
        self._unwritten: dict[int, torch.UntypedStorage] = {}

    @property
    def found(self) -> OverflowSource:
        """What was found."""
        return self._found or self._maybe or OverflowSource(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it took and gave."""
        kwargs = kwargs or {}
        if self._found is not None or self._is_looking or not self._is_forward or is_in_backward():
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
            self._note("data", came_bad[0], name, None)
            return result
        for one in self._written(tensors_in(result)):
            only_minus = not _is_bad(one)
            if only_minus and (has_masks or not bool(one.isneginf().any()) or (name in _FILLS and name != "_to_copy")):
                continue
            self._note("forward", one, name, largest, is_sure=not (only_minus and name in _FILLS))
            break
        return result

    def _written(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The floating ones whose memory was not made unwritten."""
        return [one for one in _floats(tensors) if one.untyped_storage()._cdata not in self._unwritten]

    def given(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        """A module is about to be run."""
        if self.names.innermost is not None:
            return
        self._is_forward, self._is_looking = True, True
        for one in _floats(tensors):
            if self._found is None and _is_bad(one):
                self._note("data", one, None, None, module=Module("", type(module).__name__))
        self._is_looking = False

    def gave(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        """A module was run."""
        if self.names.innermost is None:
            self._watch_backward(tensors)

    def before_backward(self, context: object, loss: Tensor, scale: Tensor | float) -> None:
        """A loss is about to be scaled."""
        self.loss, self.scale = loss.detach(), float(scale)
        self.was_backward = True
        self.has_gradient |= loss.is_leaf and loss.requires_grad  # which has no node that could be watched
        self._is_forward = False
        self.names.running.clear()
        self._watch_backward([loss])

    def remove_hooks(self) -> None:
        """Take the hooks of nodes off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch_backward(self, tensors: Sequence[Tensor]) -> None:
        """Have each node behind these tensors looked at when its backward is run."""
        self.names.claim(tensors)
        watched = len(self._handles) // 2
        for node in list(self.names.owner)[watched:]:
            self._handles.append(node.register_prehook(lambda grads, node=node: self._arrives(node, grads)))
            self._handles.append(node.register_hook(lambda gave, took, node=node: self._gives(node, gave, took)))

    def _arrives(self, node: Node, grads: Sequence[Tensor | None]) -> None:
        self.was_backward = self.has_gradient = True
        for one in _floats(grads):
            if self._found is None and not bool(one.isfinite().all()):
                self._note("backward", one, f"a sum of gradients, or a hook, before {name_of(node)}", None, node)

    def _gives(self, node: Node, gave: Sequence[Tensor | None], took: Sequence[Tensor | None]) -> None:
        for one in _floats(gave):
            if self._found is None and not bool(one.isfinite().all()):
                self._note("backward", one, name_of(node), _largest(_floats(took)), node)

    def _note(
        self,
        phase: Phase,
        tensor: Tensor,
        operation: str | None,
        largest: float | None,
        node: Node | None = None,
        module: Module | None = None,
        is_sure: bool = True,
    ) -> None:
        if node is not None:
            module = self.names.owner.get(node)
        module = module or self.names.innermost
        own = [] if node is None else [self._places[i].parameter for i in parameters_of(node) if i in self._places]
        source = OverflowSource(
            phase=phase,
            module=None if module is None else module.name,
            module_type=None if module is None else module.type,
            operation=operation,
            parameter=own[-1] if own else None,
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
    scale_loss: Callable[[Tensor], Any],
    loss_scale: float | None,
) -> OverflowSource:
    """As the function `amp.find_overflow`.

    Args:
        models: that are followed by hooks.
        backwards: of the engine, whose steps do nothing meanwhile.
        scalers: all of them.
        places: of parameters, by id.
        scale_loss: enters a scaled backward of a loss that `step_fn` returned without one.
        loss_scale: what dynamic scalers are set to meanwhile; None leaves them.
    """
    check_callable(step_fn, "find_overflow")
    check_shapes(models, "find_overflow")
    parameters = [(p, places[id(p)]) for m in models for p in m.parameters()]
    bad = [(values, place) for p, place in parameters for values in _floats([p]) if not bool(values.isfinite().all())]
    recording = _Recording(places)
    with ExitStack() as stack:
        events = stack.enter_context(rehearsal("find_overflow", step_fn, models, backwards, scalers, loss_scale))
        events.entered.subscribe(recording.before_backward)
        stack.callback(recording.remove_hooks)
        stack.enter_context(recording.names.following(models, recording.given, recording.gave))
        stack.enter_context(recording)
        loss = step_fn()
        if isinstance(loss, Tensor) and loss.requires_grad and not recording.was_backward:
            with scale_loss(loss) as scaled_loss:
                scaled_loss.sum().backward()
    source = _completed(recording, bad)
    if source.phase is None and not recording.has_gradient:
        raise AmpStateError(
            "find_overflow() saw no gradient, and nothing that is not finite before: the function neither ran a "
            "backward nor returned a loss that has one.  Call amp.find_overflow(lambda: loss_fn(model(x), y))."
        )
    return source


def _completed(recording: _Recording, bad: Sequence[tuple[Tensor, Place]]) -> OverflowSource:
    """What was found, with what is known of the loss; of parameters that are not finite, the first."""
    source = recording.found
    if bad:
        values, place = bad[0]
        source = OverflowSource(
            phase="weights",
            module=place.module,
            module_type=place.module_type,
            parameter=place.parameter,
            kind="nan" if bool(values.isnan().any()) else "inf",
            elements=int((~values.isfinite()).sum()),
            numel=values.numel(),
            dtype=values.dtype,
        )
    if recording.loss is None:
        return source
    return dataclasses.replace(source, loss=float(recording.loss.float().sum()), loss_scale=recording.scale)


def _floats(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """What this rank has of those that are floating; of sparse ones, what they store."""
    found = [local_of(one.detach()) for one in tensors if one is not None and one.is_floating_point()]
    return [one for one in map(stored, found) if one.numel()]


def _is_bad(tensor: Tensor) -> bool:
    """Whether it holds a NaN or +inf. -inf may be a mask."""
    return bool((tensor.isnan() | tensor.isposinf()).any())


def _largest(tensors: Sequence[Tensor]) -> float | None:
    """The largest finite magnitude."""
    found = [float(one[one.isfinite()].abs().max()) for one in tensors if bool(one.isfinite().any())]
    return max((one for one in found if math.isfinite(one)), default=None)
