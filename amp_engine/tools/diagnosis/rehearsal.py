"""Runs one batch again to observe it, and undoes all of its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from amp_engine.casting.in_force import discard_weight_casts
from amp_engine.errors import AmpStateError, AmpTypeError
from amp_engine.ground.distributed import is_fsdp2
from amp_engine.levels.policy import Policy
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.record import State
from amp_engine.stepping.records import Records
from amp_engine.tools.diagnosis.put_back import put_back
from amp_engine.tools.diagnosis.recorder import Recorder


def checked_policy(call: str, policy: Policy | None, models: Sequence[nn.Module], step_fn: Any) -> Policy:
    """The policy of an engine whose models can be rehearsed.

    Raises AmpStateError without a policy, with enabled=False, and for lazy modules; AmpTypeError without a function.
    """
    if policy is None or not policy.enabled:
        raise AmpStateError(
            f"{call}() was called, but amp.initialize() was not, or with enabled=False.  Call model, optimizer = "
            "amp.initialize(model, optimizer, opt_level=...) first."
        )
    if not callable(step_fn):
        raise AmpTypeError(
            f"{call} takes a function that runs one batch, not a {type(step_fn).__name__}.  Type for example "
            f"amp.{call}(lambda: loss_fn(model(x), y))."
        )
    check_shapes(models, call)
    return policy


def check_shapes(models: Sequence[nn.Module], call: str) -> None:
    """Raise AmpStateError for lazy modules that have not run yet; `call` is the function that the user called."""
    for model in models:
        for kind, named in (("Parameter", model.named_parameters()), ("Buffer", model.named_buffers())):
            for name, one in named:
                if is_lazy(one):
                    raise AmpStateError(
                        f"{kind} {name} of {type(model).__name__} has no shape yet (a lazy module).  Run one batch "
                        f"through the model, then call amp.{call}."
                    )


def rehearse(
    recorder: Recorder,
    call: str,
    step_fn: Callable[[], Any],
    models: Sequence[nn.Module],
    backwards: Records,
    scalers: Sequence[LossScaler],
    loss_scale: float | None = None,
) -> None:
    """Run one batch under a recorder, and the backward of its loss if `step_fn` runs none. Takes no step.

    Undoes all changes, as `put_back` does, also those of loss scales. Runs compiled code without torch.compile.

    Args:
        recorder: the only observer that is notified of the batch.
        call: the name of the public function, for errors.
        step_fn: runs the batch. Changes of all that it reaches are undone too.
        models, backwards, scalers: all of the engine.
        loss_scale: the scale of dynamic scalers meanwhile, within their bounds; None keeps their own.

    Raises AmpStateError, with nothing changed, inside of a `scale_loss` and while gradients wait for a step. Waits for
    the device.
    """
    backwards.refuse_inside(call)
    for one in backwards.all:
        if one.state is not State.IDLE or one.pending.backwards or one.backward_seen:
            raise AmpStateError(
                f"{call}() was called while gradients of a scaled backward wait for "
                f"{type(one.optimizer).__name__}.step(), which it would discard.  Call it after the step."
            )
        one.rows.scan()
        one.rows.follow(rounds=True)
    for module in (module for model in models for module in model.modules() if is_fsdp2(module)):
        cast(Any, module).reshard()  # shards are copied, and never whole parameters, whose memory FSDP releases
    columns = [one.columns for one in backwards.all]
    beside = [one for of in columns for one in (*of.params, *of.weights, *(of.copies or ()))]
    with (
        _agreed(backwards),
        put_back([step_fn, *models, *backwards.optimizers, *beside]),
        _undone(backwards, scalers),
        torch.compiler.set_stance("force_eager"),
        backwards.rehearsal() as events,
    ):
        for scaler in scalers:
            if loss_scale is not None and scaler.dynamic:
                scaler.scale.fill_(scaler.bounded(loss_scale))
        events.entered.subscribe(recorder.before_backward)
        events.closed.subscribe(recorder.closed)
        try:
            with recorder.following():
                loss = step_fn()
                if isinstance(loss, Tensor) and loss.requires_grad and not recorder.was_backward:
                    with backwards.of(loss, backwards.all, scalers[0], 0) as scaled_loss:
                        scaled_loss.sum().backward()
            recorder.finish()
        finally:
            recorder.end()


@contextmanager
def _agreed(backwards: Records) -> Iterator[None]:
    """At exit declare that masters and parameters agree, as they did at entry, and discard casts of other values."""
    try:
        yield
    finally:
        for one in backwards.all:
            one.rows.pairs.mark()
        discard_weight_casts()


@contextmanager
def _undone(backwards: Records, scalers: Sequence[LossScaler]) -> Iterator[None]:
    """At exit restore the loss scales, and forget backwards that wait for a step."""
    for scaler in scalers:
        scaler.settle()
    scales = [(s, s.scale.clone(), s.unskipped.clone(), s.found_inf.clone(), s.memory()) for s in scalers]
    try:
        yield
    finally:
        for one in backwards.all:
            one.discard()
        for scaler, scale, unskipped, found_inf, memory in scales:
            scaler.settle()
            scaler.clear_overflow_state()
            scaler.scale.copy_(scale)
            scaler.unskipped.copy_(unskipped)
            scaler.found_inf.copy_(found_inf)
            scaler.remember(memory)
