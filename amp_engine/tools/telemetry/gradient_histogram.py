"""`amp.gradient_histogram`: magnitudes of gradients, and the share that a type loses at a loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.ground.distributed import local_of
from amp_engine.ground.dtypes import dtype_name
from amp_engine.stepping import arithmetic
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.record import Record, State
from amp_engine.stepping.rows import Rows
from amp_engine.tools.diagnosis.recorder import Module, Recorder
from amp_engine.tools.diagnosis.rehearsal import checked_policy, rehearse
from amp_engine.tools.telemetry.closed_gradients import closed_gradients
from amp_engine.tools.telemetry.histogram_picture import GradientHistogram as GradientHistogram
from amp_engine.tools.telemetry.magnitudes import Limits, MagnitudeCounter, Magnitudes

_TRIES = 6
# The largest gradient is scaled to 2^14 at most, so that a sum of two such gradients does not overflow in float16.
_HEADROOM = 1
_LOWER = 2.0**-8


class _Counting(Recorder):
    """Counts the gradients of one batch with hooks. Losses are multiplied by `factor` in addition to their scales."""

    def __init__(self, models: Sequence[nn.Module], records: Sequence[Record], factor: float) -> None:
        super().__init__(models)
        self.activations = MagnitudeCounter()
        self.scale = 1.0  # of the loss whose backward is running, without the factor
        self._params = list({id(p): p for model in models for p in model.parameters()}.values())
        self._records = records
        self._factor = factor
        self._hooked: set[tuple[Node, int]] = set()  # keeps nodes alive, so that no id is reused
        self._weights: dict[int, MagnitudeCounter] = {}  # by id; the last backward has the sum of all

    @property
    def weights(self) -> Magnitudes:
        """The gradients of parameters. Waits for the device."""
        return sum((counter.read() for counter in self._weights.values()), Magnitudes())

    def gave(self, module: Module, tensors: Sequence[Tensor]) -> None:
        """Add hooks for the gradients of a module's outputs. A cast of an output counts as the same output."""
        for tensor in tensors:
            node, place = tensor.grad_fn, tensor.output_nr
            if node is None or not tensor.is_floating_point() or tensor.dim() == 0:  # a loss, whose gradient is 1
                continue
            while node.name() == "ToCopyBackward0" and (following := node.next_functions[0])[0] is not None:
                node, place = following[0], following[1]
            if (node, place) not in self._hooked:
                self._hooked.add((node, place))
                self.handles.append(tensor.register_hook(self._arrives))

    def _arrives(self, grad: Tensor) -> None:
        self.was_backward = True
        self.activations.add(grad, 1.0 / (self.scale * self._factor))

    def before_backward(self, context: object, backward: Backward, loss: Tensor) -> None:
        """Multiply the gradients of a loss's backward by the factor."""
        self.was_backward = True
        self.scale = used = float(backward.snapshot.scale)

        def begins(grad: Tensor) -> Tensor:
            """Note the scale of the loss whose backward begins, and multiply its gradient by the factor."""
            self.scale = used
            return grad * self._factor if self._factor != 1.0 else grad

        if loss.requires_grad:
            self.handles.append(loss.register_hook(begins))

    def closed(self, rows: Sequence[Rows], backward: Backward | None) -> None:
        """Count the gradients of weights."""
        for one in closed_gradients(rows):
            self._count(one.param, one.values, 1.0, self._factor)

    def finish(self) -> None:
        """Count gradients that `closed` did not see: those that `delay_unscale` left scaled, or unscaled ones."""
        for one in self._records:
            if one.state is State.DELAYED and one.delayed is not None:
                scale = float(one.delayed.snapshot.scale)
                for param in one.columns.params:
                    if param.grad is not None:
                        self._count(param, arithmetic.values(local_of(param.grad)), scale, self._factor)
        if not self._weights:
            for unscaled in self._params:
                if unscaled.grad is not None:
                    self._count(unscaled, arithmetic.values(local_of(unscaled.grad)), 1.0, 1.0)

    def end(self) -> None:
        """Remove the hooks, and drop the references to the graph."""
        super().end()
        self._hooked.clear()

    def _count(self, param: Tensor, values: Tensor, scale: float, factor: float) -> None:
        counter = self._weights[id(param)] = MagnitudeCounter()
        counter.add(values, 1.0 / (scale * factor))


def gradient_histogram(
    engine: Engine, step_fn: Callable[[], Any], dtype: torch.dtype | None = None
) -> GradientHistogram:
    """Run one batch again, and count the gradients of its activations and of weights by powers of two.

        print(amp.gradient_histogram(lambda: loss_fn(model(x), y)))
        amp.gradient_histogram(lambda: loss_fn(model(x), y)).plot("gradients.png")

    The picture follows Micikevicius et al., "Mixed Precision Training" (2018, https://arxiv.org/abs/1710.03740, figure
    3). It shows the limits of the type at scale 1 and at the present loss scale, and the share that is lost at each.

    Args:
        step_fn: runs one batch, without arguments: the forward, and the backward in `amp.scale_loss`, or returns the
            loss. `optimizer.step()` does nothing inside. At a float16 level it runs two or more times: at the present
            scale, and at the largest that overflows nowhere, where the fewest gradients are lost.
        dtype: the type whose limits are marked, such as torch.float8_e5m2. Default: the type that the level computes
            in; at O0 float16.

    Returns:
        A frozen record. All changes of the batch are undone, as by `amp.find_overflow`.

    Waits for the device. Counting takes some passes over each gradient. All ranks must call it, and each counts its own
    gradients. Raises AmpStateError before `initialize`, inside of a `scale_loss`, while gradients wait for a step, for
    lazy modules that have no shape yet, and if the batch had no gradient; AmpTypeError if `step_fn` is not callable;
    AmpValueError for a type that is not floating.
    """
    policy = checked_policy("gradient_histogram", engine.policy, engine._initialized.models, step_fn)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise AmpTypeError(f"dtype is a torch.dtype, not a {type(dtype).__name__}.  Use for example torch.float16.")
    if dtype is not None and not dtype.is_floating_point:
        raise AmpValueError(f"dtype={dtype} is not a floating type.  Use for example torch.float16.")
    names = ", ".join(dict.fromkeys(type(model).__name__ for model in engine._initialized.models))

    def run(factor: float) -> GradientHistogram:
        initialized = engine._initialized
        counting = _Counting(initialized.models, engine.records.all, factor)
        rehearse(counting, "gradient_histogram", step_fn, initialized.models, engine.records, engine.scalers)
        return GradientHistogram(
            title=f"Gradients of {names or 'the model'} at {policy.opt_level}",
            dtype=dtype_name(dtype or policy.low_precision or torch.float16),
            loss_scale=counting.scale,
            measured_at=counting.scale * factor,
            activations=counting.activations.read(),
            weights=counting.weights,
        )

    found = _where_least_is_lost(run) if policy.opt_level in ("O1", "O2", "O3") else run(1.0)
    if not (found.activations.total or found.weights.total):
        raise AmpStateError(
            "gradient_histogram() saw no gradient: the function neither ran a backward nor returned a loss that has "
            "one.  Call amp.gradient_histogram(lambda: loss_fn(model(x), y))."
        )
    return found


def _where_least_is_lost(run: Callable[[float], GradientHistogram]) -> GradientHistogram:
    """The histogram at the largest loss scale that overflows nowhere; `run` takes the factor to the present scale."""
    factor, best = 1.0, None
    for _ in range(_TRIES):
        found = run(factor)
        if found.activations.nonfinite or found.weights.nonfinite:
            if best is not None:  # the last factor was too large
                return best
            factor *= _LOWER
            continue
        best = found
        largest = (found.activations + found.weights).largest
        if largest is None:
            return best
        highest = Limits.of(torch.float16).largest - _HEADROOM
        wanted = 2.0 ** (highest - largest) / found.loss_scale
        if wanted <= factor * 2:
            return best
        factor = wanted
    return best or found
