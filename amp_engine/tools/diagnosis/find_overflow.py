"""`amp.find_overflow`: runs one batch again and checks every operation."""

from __future__ import annotations

import cmath
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError
from amp_engine.ground.distributed import local_of
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.reached import leaf_of
from amp_engine.tools.diagnosis.forward_order import name_of, parameters_of, saved_by
from amp_engine.tools.diagnosis.recorder import Module, Recorder, places_in, tensors_in
from amp_engine.tools.diagnosis.rehearsal import checked_policy, rehearse
from amp_engine.tools.diagnosis.relative_error import stored

Phase = Literal["weights", "buffers", "data", "forward", "backward"]
Kind = Literal["inf", "nan"]
_KINDS: tuple[Kind, Kind] = ("inf", "nan")

# Their results are unwritten memory.
_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_"}
# -inf from one of these is a mask.
_FILLS = {"fill", "fill_", "full", "full_like", "new_full", "masked_fill", "masked_fill_", "where", "scalar_tensor"}
_FILLS |= {"lift_fresh", "_to_copy", "copy_", "triu", "tril"}


@dataclass(frozen=True)
class OverflowSource:
    """The place where the first value of a batch that is not finite came from.

    Attributes:
        phase: "weights", "buffers": a parameter or buffer, before the batch; "data": an input of the model or of an
            operation; "forward", "backward": the operation named; None: all values that the loss depends on are finite.
        module: name of the module that runs the operation or gets the data; "" for the model itself; None outside of
            every module of the initialized models, as in a loss function.
        module_type: class of that module.
        operation: "softmax": torch's name of it in the forward, autograd's in the backward; "a sum of gradients, or a
            hook, before ..." names the operation whose backward got the value that is not finite.
        parameter: name of a parameter that the operation uses, if any; or name of the buffer.
        kind: "inf" or "nan".
        elements: number of elements that were not finite.
        numel: number of all elements; for a sparse tensor, of stored ones.
        dtype: type of the result.
        largest_input: largest finite magnitude in the inputs of the operation; None if there is no finite element.
        loss: the loss before scaling; None if the search saw no loss.
        loss_scale: the factor of the loss; None if the search saw no loss.
        finite_at: the present loss scale, if the batch was run at an earlier one, and no longer overflows at the
            present one; else None.
        masked_rows: number of rows of a softmax that were all -inf.
        unused: the first place of a value that is not finite and that the loss does not depend on; None without one.
    """

    phase: Phase | None
    module: str | None = None
    module_type: str | None = None
    operation: str | None = None
    parameter: str | None = None
    kind: Kind | None = None
    elements: int = 0
    numel: int = 0
    dtype: torch.dtype | None = None
    largest_input: float | None = None
    loss: float | None = None
    loss_scale: float | None = None
    finite_at: float | None = None
    masked_rows: int = 0
    unused: OverflowSource | None = None

    def __str__(self) -> str:
        loss = "" if self.loss is None else f"  The loss is {self.loss:.6g}, scaled by {self.loss_scale:g}."
        if self.phase is None and self.unused is not None:
            verb = "was given" if self.unused.phase == "data" else "gave"
            odd = f"{self.unused._where()} {verb} {self.unused._found()}"
            return (
                f"The loss and each gradient are finite.{loss}  On the way {odd}: nothing that the loss depends on, or "
                "it became finite again, as 1 / inf does."
            )
        if self.phase is None:
            return f"Everything is finite: each operation of the forward, and each gradient.{loss}"
        where, found = self._where(), self._found()
        if self.phase in ("weights", "buffers"):
            return f"{self.phase}: {self.parameter} holds {found}.{loss}"
        if self.phase == "data":
            return f"data: {where} was given {found}, which no operation of this batch made.{loss}"
        inputs = "" if self.largest_input is None else f", of inputs up to {self.largest_input:.4g}"
        if self.masked_rows:
            inputs += f", with -inf throughout rows ({self.masked_rows}), as of a mask that leaves nothing"
        now = ""
        if self.finite_at is not None:
            now = f"  At the present scale, {self.finite_at:g}, everything is finite: nothing to do."
        return f"{self.phase}: {where} gave the first value that is not finite: {found}{inputs}.{loss}{now}"

    def _found(self) -> str:
        return f"{self.kind} in {self.elements} of {self.numel} elements ({str(self.dtype).removeprefix('torch.')})"

    def _where(self) -> str:
        of = f" with {self.parameter}" if self.parameter else ""
        if self.module is None:
            return f"{self.operation}{of}, outside of the modules of the model,"
        module = f"{self.module} ({self.module_type})" if self.module else f"the model itself ({self.module_type})"
        return module if self.operation is None else f"{self.operation}{of} in {module}"


class _Made(NamedTuple):
    """An operation of the forward that made, or was given, a value that is not finite.

    Attributes:
        is_sure: False for a -inf that may be a mask.
    """

    source: OverflowSource
    is_sure: bool


class _Search(Recorder):
    """Checks each operation of a forward and, with hooks, each node of a backward.

    It follows values that are not finite through the operations, to know at the loss where they came from.
    """

    sees_operations = True

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__(models)
        self.loss: Tensor | None = None
        self.scale = 1.0  # of this loss
        self.has_gradient = False
        self._places = places_in(models)
        self._owner: dict[Node, Module | None] = {}  # the module that made each node
        # The source of the inf or NaN that a node will get.
        self._reaching: dict[tuple[Node, Kind], OverflowSource] = {}
        self._found: OverflowSource | None = None
        self._spoiled: list[OverflowSource] = []  # sources of bad gradients of parameters, in backward order
        self._made: list[_Made] = []  # in the order of the forward
        # Storages of values that are not finite, with their index in `_made`; kept alive, so that no id is reused.
        self._memory: dict[int, tuple[torch.UntypedStorage, int]] = {}
        # Storages that were made unwritten, so that no operation computed their values; kept alive likewise.
        self._unwritten: dict[int, torch.UntypedStorage] = {}

    @property
    def found(self) -> OverflowSource:
        """The place where the value that is not finite in the loss, or in a gradient, came from; and the loss."""
        sure = [made.source for made in self._made if made.is_sure]
        # Values of the forward that the loss hides come first: no scale mends them. One may mend the backward's.
        spoiled = sorted(self._spoiled, key=lambda one: one.phase == "backward")
        found = self._found or next(iter([*spoiled, *(one for one in sure if one.phase == "buffers")]), None)
        if self.loss is None:  # the values that it depends on are not known
            return found or next(iter([*sure, *(made.source for made in self._made)]), OverflowSource(None))
        found = found or OverflowSource(None, unused=next(iter(sure), None))
        return dataclasses.replace(found, loss=float(self.loss.float().sum()), loss_scale=self.scale)

    def look_at_weights(self, params: Iterable[nn.Parameter]) -> None:
        """Note the first parameter with an element that is not finite."""
        for param in params:
            bad = next((one for one in _floats([param]) if not _is_finite(one)), None)
            if bad is not None and self._found is None:
                place = self._places[id(param)]
                module = Module(place.module, place.module_type)
                self._found = self._source("weights", bad, module, parameter=place.parameter)

    def look_at_buffers(self) -> None:
        """Note the buffers that hold NaN or +inf; -inf may be a mask."""
        for module, name in self.modules.items():
            for key, buffer in module.named_buffers(recurse=False):
                for bad in filter(_is_bad, _floats([buffer])):
                    self._note(self._source("buffers", bad, name, parameter=name.path_to(key)), [bad])

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and note it if an input or a result is not finite."""
        if self._found is not None:
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        given = self._written(inputs)
        odd = [one for one in given if not _is_finite(one)]
        came_bad = [one for one in odd if _is_bad(one)]
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
        gave = [one for one in self._written(tensors_in(result)) if not _is_finite(one)]
        places = [place for one in odd if (place := self._place_of(one)) is not None]
        if came_bad and not places:  # no operation of this batch made it
            if name in _FILLS:
                return result  # a constant, say; the search names the operation that uses it
            places = [self._note(self._source("data", came_bad[0], self.innermost, name), came_bad)]
        if name == "fill_" and not (isinstance(args[1], Tensor) or cmath.isfinite(args[1])):
            return result  # `x[1] = inf`, which before torch 2.15 is a copy_ of a constant
        places = [place for place in places if came_bad or self._made[place].is_sure]
        if places:
            self._follow(gave, min(places))
            return result
        for one in gave:
            only_minus = not _is_bad(one)
            if only_minus and (odd or (name in _FILLS and name != "_to_copy")):
                continue
            source = self._source("forward", one, self.innermost, name, largest=largest)
            if name in ("_softmax", "_log_softmax"):
                source = dataclasses.replace(source, masked_rows=int((given[0] == -math.inf).all(args[1]).sum()))
            self._note(source, gave, is_sure=not (only_minus and name in _FILLS))
            break
        return result

    def _place_of(self, tensor: Tensor) -> int | None:
        """Return the index in `_made` of the source of the values in this storage; None if it is not known."""
        found = self._memory.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def _follow(self, tensors: Iterable[Tensor], place: int) -> None:
        for one in tensors:
            storage = one.untyped_storage()
            self._memory[storage._cdata] = storage, place

    def _note(self, source: OverflowSource, tensors: Iterable[Tensor], is_sure: bool = True) -> int:
        """Note a source, and the tensors that come from it; return its index in `_made`."""
        self._made.append(_Made(source, is_sure))
        self._follow(tensors, len(self._made) - 1)
        return len(self._made) - 1

    def _written(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The floating tensors, without those whose storage was made unwritten."""
        return [one for one in _floats(tensors) if one.untyped_storage()._cdata not in self._unwritten]

    def given(self, module: Module, tensors: Sequence[Tensor]) -> None:
        """Check the inputs of a model."""
        self._claim(tensors)
        if self.innermost is not None:
            return
        with self.paused():
            for one in _floats(tensors):
                if self._found is None and _is_bad(one) and self._place_of(one) is None:
                    self._note(self._source("data", one, Module("", module.type)), [one])
        self.is_paused = False

    def gave(self, module: Module, tensors: Sequence[Tensor]) -> None:
        """Watch the backward of the outputs of a model."""
        self._claim(tensors)
        if len(self.running) <= 1:
            self._watch_backward()

    def before_backward(self, context: object, backward: Backward, loss: Tensor) -> None:
        """Watch the backward of a scaled loss."""
        self.loss, self.scale = loss.detach(), float(backward.snapshot.scale)
        self.was_backward = True
        self.has_gradient |= loss.is_leaf and loss.requires_grad  # it has no node to watch
        self.is_paused = True
        self.running.clear()
        for one in _floats([loss]) if self._found is None else ():
            if self._made and not _is_finite(one):
                place = self._place_of(one)
                sure = [i for i, made in enumerate(self._made) if made.is_sure]
                self._found = self._made[next(iter([*sure, 0])) if place is None else place].source
        self._claim([loss])
        self._watch_backward()

    def end(self) -> None:
        """Remove the hooks, and drop the references to the graph."""
        super().end()
        self._owner.clear()
        self._reaching.clear()

    def _claim(self, tensors: Sequence[Tensor]) -> None:
        """Assign the innermost module to the nodes behind these tensors that have no module yet."""
        left: list[Node | None] = [tensor.grad_fn for tensor in tensors]
        while left:
            node = left.pop()
            if node is not None and node not in self._owner:
                self._owner[node] = self.innermost
                left += [following for following, _ in node.next_functions]

    def _watch_backward(self) -> None:
        """Add hooks that check each claimed node when its backward runs."""
        watched = len(self.handles) // 2
        for node in list(self._owner)[watched:]:
            self.handles.append(node.register_prehook(lambda grads, node=node: self._arrives(node, grads)))
            self.handles.append(node.register_hook(lambda gave, took, node=node: self._gives(node, gave, took)))

    def _arrives(self, node: Node, grads: Sequence[Tensor | None]) -> None:
        self.has_gradient = True
        leaf = leaf_of(node)
        # autograd.grad with create_graph=True, as in a gradient penalty, is a part of the forward.
        self.was_backward |= leaf is not None or not torch.is_grad_enabled()
        if self._found is not None:
            return
        with self.paused():
            sources = [self._source_of(node, kind, grads, None) for kind in _KINDS]
        if leaf is not None:  # before a leaf, a mask may still set it to 0
            self._spoiled += filter(None, reversed(sources))

    def _gives(self, node: Node, gave: Sequence[Tensor | None], took: Sequence[Tensor | None]) -> None:
        if self._found is not None:
            return
        with self.paused():
            for (following, _), grad in zip(node.next_functions, gave, strict=False):
                for kind in _KINDS:
                    if following is not None and (source := self._source_of(node, kind, [grad], took)) is not None:
                        self._reaching.setdefault((following, kind), source)

    def _source_of(
        self, node: Node, kind: Kind, grads: Sequence[Tensor | None], took: Sequence[Tensor | None] | None
    ) -> OverflowSource | None:
        """The source, `node` or one before it, of values of this kind in `grads`; None if there are no such values.

        Args:
            took: the gradients from which `node` made `grads`; None if `node` is about to get `grads`.
        """
        is_it = torch.isnan if kind == "nan" else torch.isinf
        bad = next((one for one in _floats(grads) if bool(is_it(one).any())), None)
        if bad is None:
            return None
        before = self._reaching.get((node, kind)) or self._reaching.get((node, "inf"))
        if before is not None and (kind == "nan" or (node, "inf") in self._reaching):
            return before  # inf can become NaN, but NaN never inf
        bad = torch.where(is_it(bad), bad, torch.zeros_like(bad))
        if took is None:
            source = self._source_backward(node, bad, f"a sum of gradients, or a hook, before {name_of(node)}", None)
            self._reaching[node, kind] = source
            return source
        return self._source_backward(node, bad, name_of(node), _largest(_floats(took)))

    def _source_backward(self, node: Node, tensor: Tensor, operation: str, largest: float | None) -> OverflowSource:
        # The derivative is taken at a value that is not finite, although the loss does not show it.
        for saved in saved_by(node):
            place = self._place_of(saved)
            if place is not None and self._made[place].is_sure and saved.is_floating_point() and not _is_finite(saved):
                return self._made[place].source
        own = [self._places[i].parameter for i in parameters_of(node) if i in self._places]
        module = self._owner.get(node) or self.innermost
        return self._source("backward", tensor, module, operation, own[-1] if own else None, largest)

    def _source(
        self,
        phase: Phase,
        tensor: Tensor,
        module: Module | None,
        operation: str | None = None,
        parameter: str | None = None,
        largest: float | None = None,
    ) -> OverflowSource:
        return OverflowSource(
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


def find_overflow(engine: Engine, step_fn: Callable[[], Any], loss_scale: float | None = None) -> OverflowSource:
    """Run one batch once more and name the module and operation that gave the first non-finite value.

        print(amp.find_overflow(lambda: loss_fn(model(x), y)))

    Args:
        step_fn: runs one batch, without arguments: the forward, and the backward in `amp.scale_loss`. If it returns
            a loss and runs no backward, `find_overflow` runs it, for all optimizers. `optimizer.step()` of
            initialized optimizers does nothing inside.
        loss_scale: the value of dynamic scales during the run. Default: the scale of the newest overflow, or the
            present scale if there was none. If the backward overflows at the scale of the newest overflow, the
            batch is run once more at the present scale.

    Returns:
        A record; `str()` is a sentence. Loss scales, generators and all that step_fn, models and optimizers reach
        are put back: weights, gradients, buffers, containers, attributes. An iterator that step_fn takes a batch from
        is not. Code that torch.compile compiled runs uncompiled; code that torch.jit compiled counts as one operation.

    Reads the arguments and results of every operation and waits for the device at each, so it takes many times as
    long as a step. All ranks must call it together. Raises AmpStateError before `initialize` and with
    enabled=False, inside of a `scale_loss`, while gradients wait for a step, for lazy modules that have no shape
    yet, and if there was no backward and nothing was found before it; AmpTypeError for anything but a callable.
    """
    checked_policy("find_overflow", engine.policy, engine._initialized.models, step_fn)
    records = engine.overflow_report()
    if loss_scale is not None or not records:
        return _found(engine, step_fn, loss_scale)
    found = _found(engine, step_fn, records[-1].loss_scale)
    # If the backward overflows, the user wants to know if it still does at the present scale.
    if found.phase != "backward" or all(s.loss_scale() == found.loss_scale for s in engine.scalers):
        return found
    present = _found(engine, step_fn, None)
    return found if present.phase is not None else replace(found, finite_at=present.loss_scale)


def _found(engine: Engine, step_fn: Callable[[], Any], loss_scale: float | None) -> OverflowSource:
    """Run one batch again, at `loss_scale` if given, and find the first value that is not finite."""
    models = engine._initialized.models
    search = _Search(models)
    search.look_at_weights(p for model in models for p in model.parameters())
    search.look_at_buffers()
    rehearse(search, "find_overflow", step_fn, models, engine.records, engine.scalers, loss_scale)
    if search.found.phase is None and not search.has_gradient:
        raise AmpStateError(
            "find_overflow() saw no gradient, and nothing that is not finite before: the function neither ran a "
            "backward nor returned a loss that has one.  Call amp.find_overflow(lambda: loss_fn(model(x), y))."
        )
    return search.found


def _floats(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """This rank's part of the floating tensors that have values; for sparse tensors, the stored values."""
    of_floats = (one for one in tensors if one is not None and one.is_floating_point() and not one.is_meta)
    found = [local_of(one.detach()) for one in of_floats]
    return [one for one in map(stored, found) if one.numel()]


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _is_bad(tensor: Tensor) -> bool:
    """True if `tensor` has a NaN or +inf. -inf may be a mask."""
    return bool((tensor.isnan() | tensor.isposinf()).any())


def _largest(tensors: Sequence[Tensor]) -> float | None:
    """The largest finite magnitude."""
    return max((float(one[one.isfinite()].abs().max()) for one in tensors if bool(one.isfinite().any())), default=None)
