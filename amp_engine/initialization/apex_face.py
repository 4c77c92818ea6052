"""The private names of apex that `initialize` adds to an optimizer, for scripts that read, write and call them."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn

from amp_engine.errors import AmpStateError
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.master import Master
from amp_engine.stepping.stepper import Stepper

STASH = "_amp_stash"

METHODS = (
    "_amp_lazy_init",
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
    "_post_amp_backward",
    "_prepare_amp_backward",
)


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


def put_on(optimizer: Any, stepped: Stepper) -> None:
    """Add the names to the optimizer of `stepped`, or to a wrapper of it."""
    stash = vars(stepped.optimizer).get(STASH) or Stash(stepped)  # a wrapper shares the stash of its optimizer
    vars(optimizer).update({STASH: stash, **{name: getattr(stash, name) for name in METHODS}})
    RefusesGradScaler.put_on(optimizer, stepped)


def take_off(optimizer: Any) -> None:
    """Undo `put_on`."""
    for name in (STASH, *METHODS):
        vars(optimizer).pop(name, None)
    RefusesGradScaler.take_off(optimizer)


class RefusesGradScaler:
    """The attribute that torch.amp.GradScaler reads before a step: it is false, or raises.

    Without it GradScaler would find no gradients, and say that no inf checks were recorded. A copy is plain False.
    """

    name = "_step_supports_amp_scaling"

    def __init__(self, stepped: Stepper, before: dict[str, Any]) -> None:
        self._stepped = stepped
        self._before = before

    @classmethod
    def put_on(cls, optimizer: Any, stepped: Stepper) -> None:
        """Add the attribute, unless `optimizer` has no masters or handles GradScaler's scale itself."""
        found = vars(optimizer).get(cls.name)
        if not stepped.rows.makes_masters or isinstance(found, cls) or getattr(optimizer, cls.name, False):
            return
        before = {cls.name: found} if cls.name in vars(optimizer) else {}
        vars(optimizer)[cls.name] = cls(stepped, before)

    @classmethod
    def take_off(cls, optimizer: Any) -> None:
        """Restore the attribute from before `put_on`."""
        found = vars(optimizer).get(cls.name)
        if isinstance(found, cls):
            vars(optimizer).update(found._before)
            if not found._before:
                del vars(optimizer)[cls.name]

    def __bool__(self) -> bool:
        self._stepped.refuse_foreign_scaler()
        return False

    def __reduce__(self) -> Any:
        return bool, ()


class Stash:
    """`optimizer._amp_stash` has flags and lists of parameters; its presence marks an initialized optimizer.

    Its methods with apex's names are attributes of the optimizer, too.
    """

    def __init__(self, stepped: Stepper) -> None:
        self._stepped = stepped

    def _amp_lazy_init(self) -> None:
        """Make masters for new parameters, and copy values loaded into the model's parameters to their masters."""
        self._stepped.look_for_parameters()

    _lazy_init_maybe_master_weights = _amp_lazy_init

    def _prepare_amp_backward(self) -> None:
        """Set earlier gradients aside, as `scale_loss` does at its entry."""
        self._stepped.prepare_backward()

    def _post_amp_backward(self, scaler: LossScaler) -> None:
        """Unscale, look for overflows, and add the gradients set aside, as `scale_loss` does at its exit.

        An overflow is remembered in `scaler` for its `update_scale()`. The caller decides if the step is skipped.
        """
        self._stepped.post_backward(scaler)

    def _master_params_to_model_params(self) -> None:
        """Round the masters into the model's parameters, as every step does."""
        self._stepped.rows.write_back()

    @property
    def lazy_init_called(self) -> bool:
        """True if masters follow the model's parameters. If False, the next backward compares their values, once.

        The comparison finds writes through `param.data`, which move no version, and copies them into masters.
        """
        return not self._stepped.adopts_next

    @lazy_init_called.setter
    def lazy_init_called(self, value: bool) -> None:
        self._stepped.adopt_data_writes_next(not value)

    @property
    def already_patched(self) -> bool:
        """True if the next step will be skipped. Waits for the device if that decided.

        A script that replaces `step` by a skip of its own writes True, and its skip writes False.
        """
        return self._stepped.pending.skips_next

    @already_patched.setter
    def already_patched(self, value: bool) -> None:
        if value:
            self._stepped.pending.leave_skip_to_caller()
        elif self._stepped.pending.caller_skips:
            self._stepped.skipped_by_caller()

    @property
    def params_have_scaled_gradients(self) -> bool:
        """True if gradients were left scaled, as by `delay_unscale`, so that the next backward adds to them."""
        return self._stepped.window.is_left_open

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        self._stepped.set_left_open(value)

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """Per group: the model's low-precision parameters that have masters."""
        return [[m.param for m in group] for group in self._mastered()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[nn.Parameter]]:
        """Per group: the masters of `fp16_groups`, in the same order."""
        return [[m.weight for m in group] for group in self._mastered()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[nn.Parameter]]:
        """Per group: the parameters that the optimizer steps without a master."""
        find = self._stepped.rows.find
        return [[p for p in group["params"] if find(p) is None] for group in self._stepped.optimizer.param_groups]

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

    def _mastered(self) -> list[list[Master]]:
        find = self._stepped.rows.find
        found = [[find(p) for p in group["params"]] for group in self._stepped.optimizer.param_groups]
        return [[m for m in group if m is not None] for group in found]
