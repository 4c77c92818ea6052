"""apex's older interface: `handle = amp.init()`, which casts functions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from amp_engine.casting import FunctionCasts
from amp_engine.errors import AmpStateError

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

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> NoReturn:
        """Raises AmpStateError: `initialize` gives an optimizer its scalers."""
        raise AmpStateError(
            "wrap_optimizer() of the old Amp API is not served.  Call model, optimizer = amp.initialize(model, "
            f"optimizer, num_losses={num_loss}) in place of amp.init(), and `with amp.scale_loss(loss, optimizer, "
            "loss_id=0) as scaled_loss`."
        )

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """Raises AmpStateError, as in apex: a handle does not know which scaler to use."""
        raise AmpStateError(
            "The old Amp API is no longer supported.  Please move to the new API, model, optimizer = "
            "amp.initialize(model, optimizer) and `with amp.scale_loss(loss, optimizer) as scaled_loss`."
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
