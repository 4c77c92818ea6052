"""The private names of apex that `initialize` adds to an optimizer, for scripts that read, write and call them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

from amp_engine.errors import AmpStateError
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.beside import Beside, Master
from amp_engine.stepping.record import Record, State
from amp_engine.stepping.records import Records
from amp_engine.stepping.step import APEX_NAMES, StepHook

STASH, *METHODS = APEX_NAMES


def is_on(optimizer: Any) -> bool:
    """True if an engine, or apex, looks after this optimizer."""
    return hasattr(optimizer, STASH)


def check_names_are_free(optimizer: Any) -> None:
    """Raise AmpStateError if an optimizer already has an attribute of a name in METHODS."""
    for name in METHODS:
        if hasattr(optimizer, name):
            raise AmpStateError(
                f"Incoming optimizer already has {name} defined.  amp.initialize adds an attribute of this name; "
                f"rename the one of {type(optimizer).__name__}."
            )


def put_on(optimizer: Any, record: Record, owner: Records, hook: StepHook | None = None) -> None:
    """Add the names to the optimizer of `record`, or to a wrapper of it, and keep `hook` alive with them."""
    stash = vars(record.optimizer).get(STASH) or Stash(record, owner, hook)  # a wrapper shares its optimizer's
    vars(optimizer).update({STASH: stash, **{name: getattr(stash, name) for name in METHODS}})


def take_off(optimizer: Any) -> None:
    """Undo `put_on`."""
    for name in (STASH, *METHODS):
        vars(optimizer).pop(name, None)


class ByGroup:
    """The parameters of a record by group and by type, as apex lists them."""

    _record: Record

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """Per group: the model's low-precision parameters that have masters."""
        return [[m.param for m in beside if isinstance(m, Master)] for _, beside in self._groups()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[nn.Parameter]]:
        """Per group: the masters of `fp16_groups`, in the same order, with their gradients."""
        if self._record.state is State.IDLE:
            self._record.hand_out()
        return [[m.weight for m in beside if isinstance(m, Master)] for _, beside in self._groups()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[nn.Parameter]]:
        """Per group: the float32 parameters."""
        return [[p for p in params if p.dtype is torch.float32] for params, _ in self._groups()]

    def _groups(self) -> list[tuple[list[nn.Parameter], list[Beside | None]]]:
        """Per group: its parameters, and what lies beside each."""
        rows = self._record.rows
        rows.scan()
        beside = iter(rows.columns.beside)
        groups = self._record.optimizer.param_groups
        return [(group["params"], [next(beside) for _ in group["params"]]) for group in groups]


class Stash(ByGroup):
    """`optimizer._amp_stash` has flags and lists of parameters; its presence marks an initialized optimizer.

    Its methods with apex's names are attributes of the optimizer, too.
    """

    def __init__(self, record: Record, owner: Records, hook: StepHook | None) -> None:
        self._record = record
        self._owner = owner
        self._hook = hook  # torch's lists of hooks forget it where the optimizer's constructor is called again
        self.lazy_init_called = True  # written by scripts that resume; masters follow without it

    def _amp_lazy_init(self) -> None:
        """Make masters for new parameters, and copy values loaded into the model's parameters to their masters."""
        self._record.look_for_parameters()

    _lazy_init_maybe_master_weights = _amp_lazy_init

    def _prepare_amp_backward(self) -> None:
        """Set earlier gradients aside, as a backward in `scale_loss` does."""
        self._owner.prepare(self._record)

    def _post_amp_backward(self, scaler: LossScaler) -> None:
        """Unscale, look for overflows, and add the gradients set aside, as `scale_loss` does at its exit.

        An overflow is remembered in `scaler` for its `update_scale()`. The caller decides if the step is skipped.
        """
        self._owner.post(self._record, scaler)

    @property
    def params_have_scaled_gradients(self) -> bool:
        """True if gradients were left scaled, as by `delay_unscale`, so that the next backward adds to them."""
        return self._record.state is State.DELAYED

    @property
    def all_fp16_params(self) -> list[nn.Parameter]:
        """`fp16_groups` in one list."""
        return list(chain.from_iterable(self.fp16_groups))

    @property
    def all_fp32_from_fp16_params(self) -> list[nn.Parameter]:
        """`fp32_from_fp16_groups` in one list."""
        return list(chain.from_iterable(self.fp32_from_fp16_groups))

    @property
    def all_fp32_from_fp32_params(self) -> list[nn.Parameter]:
        """`fp32_from_fp32_groups` in one list."""
        return list(chain.from_iterable(self.fp32_from_fp32_groups))
