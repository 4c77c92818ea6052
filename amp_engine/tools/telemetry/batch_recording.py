"""Records one batch of a reference by operation, and compares another run with the records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_engine.errors import AmpValueError
from amp_engine.ground.distributed import is_sharded
from amp_engine.ground.dtypes import LOW_PRECISION, dtype_name
from amp_engine.ground.torch_private import written_arguments
from amp_engine.kernels.layout import address_of
from amp_engine.tools.diagnosis.recorder import Module, Recorder, tensors_in
from amp_engine.tools.diagnosis.relative_error import distance, growth
from amp_engine.tools.telemetry.comparison import ComparedModule, ComparedOperation

# These move or convert numbers: casts consist of them, and some kernels call them only for some types.
_MOVES = {"_to_copy", "to", "copy_", "copy", "clone", "contiguous", "lift_fresh", "detach", "set_", "resize_"}
# These overwrite their input.
_MOVES |= {"fill_", "zero_", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_full"}
_MOVES |= {"new_ones", "new_empty_strided"}
# The results of these depend only on the shape of the input and on the state of a generator.
_RANDOM = {"bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "rand"}
_RANDOM |= {"rand_like", "randn", "randn_like", "randint", "randint_like", "random_", "randperm", "uniform_"}
# An operation under several names, from which torch picks by type.
_FAMILIES = {"batch_norm": "batch_norm", "scaled_dot_product": "scaled_dot_product_attention"}
# Inputs with a larger relative distance are different batches: casts and roundings outside of the model make far
# smaller differences, and independent numbers differ by 1.4.
_ANOTHER_BATCH = 0.1


class Key(NamedTuple):
    """Identifies an operation in both runs: the `nth` of its name in the `call`-th call of a module.

    Attributes:
        module: name of the innermost module; None outside of all modules.
        call: number of the call of the module, from 1; 0 outside.
        operation: torch's name of the operation.
        nth: number of this name in the call, from 1.
    """

    module: str | None
    call: int
    operation: str
    nth: int


class _Held:
    """The value of a tensor at one moment: a reference, and a copy from before its memory is written."""

    def __init__(self, tensor: Tensor) -> None:
        self.value = tensor.detach()

    def save(self, copies: dict[Any, Tensor]) -> None:
        """Replace the reference by a copy, which all _Held of the same elements share."""
        key = (address_of(self.value), self.value.shape, self.value.stride(), self.value.dtype)
        if key not in copies:
            copies[key] = self.value.clone()
        self.value = copies[key]


@dataclass(frozen=True)
class _Recorded:
    """The inputs and the result of an operation of the reference."""

    given: list[_Held]
    gave: _Held


class Follower(Recorder):
    """Gives keys to each operation of a forward, inputs and outputs of modules, and the gradients of outputs."""

    sees_operations = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__([model])
        self._calls: Counter[str] = Counter()
        self._counts: Counter[tuple[str | None, int, str]] = Counter()
        self._has_begun = False

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and pass it to `_saw`, unless it only moves numbers."""
        name: str = func.overloadpacket.__name__
        given = _floats(tensors_in((args, kwargs)))
        outputs = _floats(tensors_in(written_arguments(func, args, kwargs)))
        written = {t.untyped_storage()._cdata for t in outputs}
        if written:
            self._before_write(written)
            if not name.endswith("_"):  # `out` and statistics are no inputs of the result
                given = [t for t in given if not any(t is output for output in outputs)]
            given = [t.clone() if t.untyped_storage()._cdata in written else t for t in given]
        result = func(*args, **kwargs)
        self._drawn(name, func, args, given, tensors_in(result))
        gave = _floats(tensors_in(result))[:1]  # the others are statistics, or saved for the backward
        if not gave or not given or name in _MOVES | _RANDOM:
            return result
        own = {t.untyped_storage()._cdata for t in given}
        is_view = not written and gave[0].untyped_storage()._cdata in own
        if not is_view:
            operation = next((family for part, family in _FAMILIES.items() if part in name), name)
            # The operation writes running statistics, which are no inputs of its result.
            self._saw(self._key(operation), given[:3] if operation == "batch_norm" else given, gave[0])
        return result

    def given(self, module: Module, tensors: Sequence[Tensor]) -> None:
        """Pass the inputs of a module to `_saw_value`."""
        name = module.name
        self._calls[name] += 1
        with self.paused():
            if not self._has_begun:
                self._has_begun = True
                self._begins(tensors)
            for i, one in enumerate(_floats(tensors)):
                self._saw_value(Key(name, self._calls[name], "input", i), one)

    def gave(self, module: Module, tensors: Sequence[Tensor]) -> None:
        """Pass the outputs of a module, and later their gradients, to `_saw_value`."""
        name = module.name
        with self.paused():
            for i, one in enumerate(_floats(tensors)):
                self._saw_value(Key(name, self._calls[name], "output", i), one)
                if one.requires_grad:
                    key = Key(name, self._calls[name], "gradient", i)
                    self.handles.append(one.register_hook(lambda grad, key=key: self._saw_value(key, grad)))

    def _drawn(self, name: str, func: Any, args: Any, given: Sequence[Tensor], gave: Sequence[Tensor]) -> None:
        """If an operation drew random numbers, let both runs use the same ones, because types draw differently."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        if name in _RANDOM and gave:
            self._drew(self._key(f"random {name}"), gave[0])
        if name == "native_dropout" and args[2] is not False:  # input, p, train; gives output and mask
            self._drew(self._key(f"random {name}"), gave[1])
            gave[0].copy_(given[0] * gave[1] * (1.0 / (1.0 - args[1]) if args[1] < 1.0 else 0.0))

    def _key(self, operation: str) -> Key:
        """The key of the operation that has just run."""
        module = self.innermost
        name, call = (None, 0) if module is None else (module.name, self._calls[module.name])
        self._counts[name, call, operation] += 1
        return Key(name, call, operation, self._counts[name, call, operation])

    def _before_write(self, storages: set[int]) -> None:
        """Called before memory is written."""

    def _begins(self, tensors: Sequence[Tensor]) -> None:
        """Called with the model's inputs."""

    def _drew(self, key: Key, numbers: Tensor) -> None:
        """Called after an operation drew random numbers."""

    def _saw(self, key: Key, given: Sequence[Tensor], gave: Tensor) -> None:
        """Called after an operation."""

    def _saw_value(self, key: Key, value: Tensor) -> None:
        """Called with a module's input or output, or an output's still scaled gradient; `key.operation` tells which."""


class Recording(Follower):
    """The reference run: keeps the results of operations and modules, and the gradients of outputs."""

    def __init__(self, model: nn.Module, loss_scale: float) -> None:
        super().__init__(model)
        self.operations: dict[Key, _Recorded] = {}
        self.values: dict[Key, _Held] = {}  # inputs, outputs and gradients of modules, and random numbers
        self.batch: list[Tensor] = []
        self._loss_scale = loss_scale
        self._of_storage: dict[int, list[_Held]] = {}

    def end(self) -> None:
        """End the batch: later writes no longer change recorded values."""
        super().end()
        self._of_storage.clear()

    def _hold(self, tensor: Tensor) -> _Held:
        held = _Held(tensor)
        self._of_storage.setdefault(tensor.untyped_storage()._cdata, []).append(held)
        return held

    def _before_write(self, storages: set[int]) -> None:
        copies: dict[Any, Tensor] = {}
        for storage in storages:
            for held in self._of_storage.pop(storage, ()):
                held.save(copies)

    def _begins(self, tensors: Sequence[Tensor]) -> None:
        self.batch = [t.detach().clone() for t in tensors]

    def _drew(self, key: Key, numbers: Tensor) -> None:
        self.values[key] = self._hold(numbers)

    def _saw(self, key: Key, given: Sequence[Tensor], gave: Tensor) -> None:
        self.operations[key] = _Recorded([self._hold(t) for t in given], self._hold(gave))

    def _saw_value(self, key: Key, value: Tensor) -> None:
        is_gradient = key.operation == "gradient"
        self.values[key] = _Held(unscaled(value, self._loss_scale)) if is_gradient else self._hold(value)


class Comparing(Follower):
    """Another run of the batch, at a level whose type has this unit roundoff: keeps only relative errors."""

    def __init__(
        self,
        model: nn.Module,
        reference: Recording,
        roundoff: float,
        loss_scale: float,
    ) -> None:
        super().__init__(model)
        self.operations: list[ComparedOperation] = []
        self._errors: dict[tuple[str | None, str], float] = {}  # the largest of each module's inputs, outputs, ...
        self.unmatched: list[tuple[str | None, bool]] = []  # the module of each, and True if it took or gave half
        self._reference, self._roundoff, self._loss_scale = reference, roundoff, loss_scale
        self._types = dict[str | None, str | None](self.modules.values())

    def by_module(self) -> tuple[ComparedModule, ...]:
        """The modules that have their own operations: not finite first, then by growth."""
        modules = []
        for name in dict.fromkeys([o.module for o in self.operations] + [name for name, _ in self.unmatched]):
            own = [o for o in self.operations if o.module == name]
            others = [low for module, low in self.unmatched if module == name]
            largest = max((o.growth for o in own), default=0.0)
            error = self._errors.get((name, "output"))
            if others and error is not None:
                largest = max(largest, growth(error, self._errors.get((name, "input"), 0.0), self._roundoff))
            modules.append(
                ComparedModule(
                    module=name,
                    module_type=self._types.get(name),
                    operations=len(own) + len(others),
                    unmatched=len(others),
                    in_low_precision=sum(o.in_low_precision for o in own) + sum(others),
                    growth=largest,
                    error=error,
                    gradient_error=self._errors.get((name, "gradient")),
                )
            )
        return tuple(sorted(modules, key=lambda m: -m.growth))

    def _begins(self, tensors: Sequence[Tensor]) -> None:
        before = self._reference.batch
        if len(before) != len(tensors) or not all(map(_is_same_batch, tensors, before)):
            raise AmpValueError(
                "step_fn gave the model other inputs than the first time it was called, and the two runs cannot be "
                "compared.  Take one batch before the call: x, y = next(batches), then lambda model: loss_fn(model(x), "
                "y)."
            )

    def _drew(self, key: Key, numbers: Tensor) -> None:
        held = self._reference.values.get(key)
        if held is not None and held.value.shape == numbers.shape:
            numbers.copy_(held.value)

    def _saw(self, key: Key, given: Sequence[Tensor], gave: Tensor) -> None:
        recorded = self._reference.operations.get(key)
        in_low_precision = any(t.dtype in LOW_PRECISION for t in (*given, gave))
        if recorded is None or recorded.gave.value.shape != gave.shape:
            self.unmatched.append((key.module, in_low_precision))
            return
        error = distance(gave, recorded.gave.value).relative
        error_in = 0.0
        if len(given) == len(recorded.given):
            pairs = ((t, held.value) for t, held in zip(given, recorded.given, strict=True))
            error_in = max((distance(t, value).relative for t, value in pairs if value.shape == t.shape), default=0.0)
        self.operations.append(
            ComparedOperation(
                **key._asdict(),
                module_type=self._types.get(key.module),
                order=len(self.operations),
                dtype=dtype_name(gave.dtype),
                in_low_precision=in_low_precision,
                error_in=error_in,
                error=error,
                growth=growth(error, error_in, self._roundoff),
            )
        )

    def _saw_value(self, key: Key, value: Tensor) -> None:
        held = self._reference.values.get(key)
        if held is None or held.value.shape != value.shape:
            return
        factor = 1.0 / self._loss_scale if key.operation == "gradient" else 1.0
        error = distance(value, held.value, factor).relative
        place = key.module, key.operation
        self._errors[place] = max(self._errors.get(place, 0.0), error)


def unscaled(gradient: Tensor, loss_scale: float) -> Tensor:
    """The gradient without the loss scale: in the same type if the scale is 1, else float32 or float64."""
    gradient = gradient.detach()
    if gradient.is_sparse:  # adds up in its own type, as a step does, so sums overflow here too
        gradient = gradient.coalesce()
    if loss_scale == 1.0:
        return gradient
    return (gradient if gradient.dtype is torch.float64 else gradient.float()) / loss_scale


def _floats(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose elements can be compared."""
    return [t for t in tensors if t.is_floating_point() and t.layout is torch.strided and not is_sharded(t)]


def _is_same_batch(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.is_floating_point() != b.is_floating_point():
        return False
    if a.is_floating_point() and a.layout is torch.strided:
        error = distance(a, b).relative
        return error <= _ANOTHER_BATCH or math.isinf(error)
    return a.layout is not torch.strided or bool(torch.equal(a, b.to(a.device)))
