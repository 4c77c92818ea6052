"""apex's older interface: `handle = amp.init()`, `optimizer = handle.wrap_optimizer(optimizer)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from amp_engine.casting import FunctionCasts
from amp_engine.errors import AmpIndexError, AmpStateError
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.record import Record
from amp_engine.stepping.step import CLOSURE_REFUSED

if TYPE_CHECKING:
    from amp_engine.engine import Engine


class Handle:
    """The object of `_amp_state.handle` and of `amp.init()`: the function casts of the engine, if there is one."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine

    @property
    def _casts(self) -> FunctionCasts | None:
        return None if self._engine is None else self._engine.function_casts.casts

    def is_active(self) -> bool:
        """True if functions are cast now."""
        return self._casts is not None and self._casts.is_active

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        if self._casts is not None:
            self._casts.switch(bool(value))

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Wrap `optimizer`, to give it `scale_loss` and a dynamic scaler for each of `num_loss` losses.

        Raises AmpStateError or AmpTypeError for an optimizer that `amp.initialize` would not take.
        """
        return OptimWrapper(optimizer, self._engine, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Raises AmpStateError, as in apex: a handle does not know which scaler to use."""
        raise AmpStateError(
            "The old Amp API is no longer supported.  Please move to the new API, model, optimizer = "
            "amp.initialize(model, optimizer) and `with amp.scale_loss(loss, optimizer) as scaled_loss`; or call "
            "optimizer = handle.wrap_optimizer(optimizer) and `with optimizer.scale_loss(loss) as scaled_loss`."
        )

    def _clear_cache(self) -> None:
        if self._casts is not None:
            self._casts.cache.clear()

    def _disable_casts(self) -> AbstractContextManager[None]:
        return nullcontext() if self._engine is None else self._engine.disable_casts()

    def _deactivate(self) -> None:
        if self._casts is not None:
            self._casts.remove()


class NoOpHandle(Handle):
    """The handle of `amp.init(enabled=False)`, which does nothing."""

    def __init__(self) -> None:
        super().__init__(None)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """A context that yields `loss` itself."""
        return nullcontext(loss)


class OptimWrapper:
    """An optimizer with `scale_loss`. Everything else is the optimizer's own.

        optimizer = handle.wrap_optimizer(optimizer, num_loss=2)
        with optimizer.scale_loss(loss_a) as scaled_loss:
            scaled_loss.backward()
        with optimizer.scale_loss(loss_b) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    Args:
        optimizer: of FP32 parameters; the engine handles it until `amp.close()`.
        engine: with function casts on; None scales nothing.
        num_loss: the number of losses between two steps; the n-th loss has the n-th scaler.
    """

    _optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, engine: Engine | None, num_loss: int = 1) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._scalers = [LossScaler("dynamic") for _ in range(num_loss)]
        self._losses = 0  # since the last step
        self._record: Record | None = None
        if engine is not None:
            reporter = engine.reporter

            def say_skipped(is_first: bool) -> None:
                if reporter.says(is_first):
                    reporter.say("Gradient overflow, skipping update")

            self._record = engine.look_after(optimizer, say_skipped)

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield `loss.float() * scale`; on exit unscale gradients, add those of earlier losses, and adjust the scale.

        Yields the loss itself while no function is cast. If the body raises, gradients get the values that they had at
        the entry. Raises AmpIndexError if there were `num_loss` losses since the last step. No host sync.
        """
        engine, casts, record = self._engine, self._active_casts(), self._record
        if engine is None or casts is None or record is None:
            yield loss
            return
        index = self._losses
        if index >= len(self._scalers):
            raise AmpIndexError(
                f"scale_loss() was entered for loss number {index + 1} since the last step, but there are "
                f"{len(self._scalers)}.  Call handle.wrap_optimizer(optimizer, num_loss={index + 1})."
            )
        scaler = self._scalers[index]
        with engine.records.of(loss, [record], scaler, index) as scaled_loss:
            yield scaled_loss
        self._losses += 1

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer, with casts off; if one of the losses overflowed, print a line and skip the step.

        Raises NotImplementedError for a closure if losses are scaled.
        """
        if closure is None:
            self._losses = 0
            return self._optimizer.step()
        if self._active_casts() is None:
            return self._optimizer.step(closure)
        raise NotImplementedError(
            f"{CLOSURE_REFUSED}  Run the closure's forward and backward with optimizer.scale_loss yourself, then call "
            "step() without arguments."
        )

    def _active_casts(self) -> FunctionCasts | None:
        casts = None if self._engine is None else self._engine.function_casts.casts
        return casts if casts is not None and casts.is_active else None

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # copy and pickle look attributes up before they are set
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
