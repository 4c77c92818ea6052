"""Gradients that a scaled backward leaves in parameters that no optimizer of its loss steps.

The exit unscales them like those of the loss's own optimizers: such a parameter may join an optimizer with its
gathered gradient (`add_param_group`), or another optimizer steps it next. Nothing tells it from a parameter that is
never stepped, and once a second backward at another scale has added to a gradient, no scale undoes it. Parameters that
would get a master keep scaled gradients, as all low-precision gradients of the model are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from amp_engine.errors import AmpStateError
from amp_engine.ground.devices import moved
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.kernels import tensor_lists
from amp_engine.scaling.snapshot import ScaleSnapshot
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.rows import Rows, is_zero
from amp_engine.stepping.stepper import Stepper
from amp_engine.stepping.window import Window


class _Nobody:
    """Takes the place of an optimizer for parameters without one."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params}]


class _Others:
    """The parameters that some optimizers do not step.

    Attributes:
        low: the parameters that would get a master.
        rows: the rows of those that would not.
        stepped: weak references to optimizers that step some of them.
    """

    def __init__(self, low: list[nn.Parameter], plain: list[nn.Parameter], stepped: list[Stepper]) -> None:
        self.stepped = [weakref.ref(one) for one in stepped]
        self.low, self.low_handle = low, tensor_lists.params(low)
        self.plain_handle = tensor_lists.params(plain)
        self.nobody = _Nobody(plain)
        self.rows = Rows(self.nobody)  # type: ignore[arg-type]


class Unlisted:
    """The unlisted parameters of one engine.

    Args:
        models: gives the initialized models. Parameters that any other module has registered since the first of them
            count, too, and those that have been in an optimizer.
    """

    def __init__(self, models: Callable[[], Iterable[nn.Module]]) -> None:
        self.scale: ScaleSnapshot | None = None  # of gradients that low-precision parameters have gathered
        self._models = models
        self._has_scaled = False  # True once a body was entered at a scale that is not known to be 1
        self._late: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._stop: weakref.finalize[..., Unlisted] | None = None  # call it to stop noticing registrations
        self._found: dict[tuple[Any, ...], _Others] = {}
        self._alive: list[weakref.ref[Any]] = []
        # Of the running body.
        self._others: _Others | None = None
        self._window: Window | None = None
        self._backward: Backward | None = None

    def begin(self) -> None:
        """Notice parameters that modules register from now on, until `end`."""
        self.forget()
        if self._stop is not None:
            return
        ref = weakref.ref(self)

        def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            one = ref()
            if one is not None and param is not None:
                one._late.add(module)
                one.forget()

        self._stop = weakref.finalize(self, register_module_parameter_registration_hook(registered).remove)

    def end(self) -> None:
        """Stop noticing parameters, and forget everything."""
        self.forget()
        self._late.clear()
        self.scale, self._has_scaled = None, False
        if self._stop is not None:
            self._stop()
        self._stop = None

    def forget(self, *_: Any) -> None:
        """Forget found parameters, to look for them again. Also called when a module or optimizer ends."""
        self._found.clear()
        self._alive.clear()

    def enter(self, backward: Backward, everyone: list[Stepper]) -> None:
        """Set unlisted gradients aside at the entry of a body, after its windows open. Does nothing without any."""
        if not backward.snapshot.is_identity:
            self._has_scaled = True
        others = self._of(everyone)
        if others is None:
            return
        self._others, self._backward = others, Backward(backward.scaler, backward.loss_id, backward.snapshot)
        if others.low:
            self._rescale(others, backward.snapshot)
        self._window = None
        if tensor_lists.any_gradient(others.plain_handle):
            self._window = Window(others.rows)
            self._window.open(self._backward, waits=True)

    def check_gathered(self, optimizer: Optimizer, joined: Iterable[nn.Parameter], everyone: list[Stepper]) -> None:
        """Raise AmpStateError for a parameter that joined with a gradient which no exit can have unscaled.

        It is in no module that was passed to `initialize` or made since, so nothing tells whether a scaled backward
        left the gradient, or at which scales. Waits for the device.
        """
        if not self._has_scaled:
            return
        known = {id(p) for m in self._modules() for p in m._parameters.values()}
        known |= {id(p) for one in everyone for p in one.rows.departed}
        for p in joined:
            if id(p) not in known and not is_zero(p.grad):
                raise AmpStateError(
                    f"A parameter of shape {tuple(p.shape)} joined {type(optimizer).__name__} with a gradient.  It is "
                    "in no module that was passed to amp.initialize or made since, so amp cannot tell whether that "
                    "gradient is multiplied by the loss scale.  Nothing was stepped.  Set its `.grad` to None, or pass "
                    "all modules that are trained to amp.initialize([model, head], ...)."
                )

    @property
    def windows(self) -> list[Window]:
        """The window of the running body in a list; an empty list without one."""
        return [] if self._window is None else [self._window]

    def exit(self) -> None:
        """At the exit of a body: unscale gradients that arrived, and have other optimizers check them."""
        others, window, backward = self._others, self._window, self._backward
        self._others = self._window = self._backward = None
        if others is None or backward is None:
            return
        if window is None:
            if not tensor_lists.any_gradient(others.plain_handle):
                return
            window = Window(others.rows)
            window.adopt(backward)
            has_arrived = True
        else:
            has_arrived = window.has_arrived()
        # Look before earlier gradients are put back.
        alive = [one for ref in others.stepped if (one := ref()) is not None] if has_arrived else []
        given = [one for one in alive if tensor_lists.any_gradient(one.rows.columns.plain_handle)]
        window.close(backward, False)
        for one in given:
            one.is_given_gradients()

    def discard(self) -> None:
        """Put earlier gradients back after the body raised."""
        others, window = self._others, self._window
        self._others = self._window = self._backward = None
        if window is not None:
            window.discard_backward()
        elif others is not None:
            tensor_lists.discard_gradients(others.plain_handle)

    def _rescale(self, others: _Others, snapshot: ScaleSnapshot) -> None:
        """Rescale gathered low-precision gradients to the scale of gradients that will be added to them."""
        earlier, self.scale = self.scale, snapshot
        if not tensor_lists.any_gradient(others.low_handle) or (earlier is not None and earlier.equals(snapshot)):
            return
        factor = snapshot.scale if earlier is None else snapshot.scale * earlier.inv_scale
        for p in others.low:
            if p.grad is not None:
                p.grad.mul_(moved(factor, p.grad.device))

    def _of(self, everyone: list[Stepper]) -> _Others | None:
        owners = [one for one in everyone if not one.window.is_closed]  # some are of this body
        # Ids, which keep no optimizer or parameter alive.
        key = (*map(id, owners), -1, *map(id, everyone), *[one.rows.scans for one in everyone])
        found = self._found.get(key)
        if found is None:
            if len(self._found) > 64:
                self.forget()
            self._found[key] = found = self._look(owners, everyone)
        return found if found.low or found.nobody.param_groups[0]["params"] else None

    def _modules(self) -> list[nn.Module]:
        found = {id(m): m for model in self._models() for m in model.modules()} | {id(m): m for m in self._late}
        return list(found.values())

    def _look(self, owners: list[Stepper], everyone: list[Stepper]) -> _Others:
        modules = self._modules()
        self._alive += [weakref.ref(m, self.forget) for m in modules]
        self._alive += [weakref.ref(one.optimizer, self.forget) for one in everyone]
        makes_masters = any(one.rows.makes_masters for one in everyone)
        # A parameter with a master belongs to its optimizer: gradients reach the master only through `scale_loss`.
        owned = {id(p) for one in owners for p in one.rows.columns.params}
        owned |= {id(m.param) for one in everyone for m in one.rows.masters}
        of_modules = (p for m in modules for p in m._parameters.values() if p is not None)
        of_others = (p for one in everyone if one not in owners for p in one.rows.columns.plain)
        departed = [p for one in everyone for p in one.rows.departed]
        params = {id(p): p for ps in (of_modules, of_others, departed) for p in ps if p.is_floating_point()}
        free = [p for key, p in params.items() if key not in owned]
        low = [p for p in free if makes_masters and is_low_precision(p)]
        plain = [p for p in free if not (makes_masters and is_low_precision(p))]
        return _Others(low, plain, [one for one in everyone if one not in owners])
