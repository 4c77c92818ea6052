"""Gradients that a scaled backward leaves in parameters that no optimizer of its loss steps.

They are unscaled when that backward ends: such a parameter may join an optimizer with its gathered gradient
(`add_param_group`), or another optimizer may step it next. It looks like a parameter that is never stepped, and once a
backward at a second scale has added to a gradient, no factor can unscale it. A backward of another loss, which is not
scaled, may follow before the exit. Parameters that would get a master keep scaled gradients, like all low-precision
parameters of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_engine.errors import AmpStateError
from amp_engine.ground.devices import moved
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.kernels import tensor_lists
from amp_engine.scaling.snapshot import ScaleSnapshot
from amp_engine.stepping.arithmetic import is_zero
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.master import masters_of
from amp_engine.stepping.rows import Rows
from amp_engine.stepping.stepper import Stepper
from amp_engine.stepping.window import Window

T = TypeVar("T")


class _Nobody:
    """Stands in for the optimizer of parameters that have none."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params}]


class _Others:
    """The parameters that the optimizers of a loss do not step.

    Attributes:
        low: the parameters that would get a master.
        rows: the rows of all others.
        stepped: weak references to the Steppers of other optimizers, which may step some of them.
    """

    def __init__(self, low: list[nn.Parameter], plain: list[nn.Parameter], stepped: list[weakref.ref[Stepper]]) -> None:
        self.stepped = stepped
        self.low, self.low_handle = low, tensor_lists.params(low)
        nobody = _Nobody(plain)
        self.rows = Rows(nobody)  # type: ignore[arg-type]
        self.rows.scan()


class _Running(NamedTuple):
    """A backward that runs: its unlisted parameters, its scale, and the window of their earlier gradients."""

    others: _Others
    backward: Backward
    window: Window | None


class Unlisted:
    """The unlisted parameters of one engine.

    Args:
        models: gives the initialized models. Parameters that any other module has registered since `begin` count, too,
            and those that have left an optimizer, unless another engine has them.
        optimizers: gives the initialized optimizers.

    Attributes:
        changes: count of calls of `forget`.
    """

    def __init__(
        self, models: Callable[[], Iterable[nn.Module]], optimizers: Callable[[], Iterable[Optimizer]]
    ) -> None:
        self.scale: ScaleSnapshot | None = None  # the scale of gradients that low-precision parameters gathered
        self.changes = 0
        self._models, self._optimizers = models, optimizers
        self._has_scaled = False  # True once a body was entered at a scale that is not known to be 1
        self._late: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._found: dict[tuple[Any, ...], _Others] = {}
        self._alive: list[weakref.ref[Any]] = []
        self._running: _Running | None = None  # None while no scaled backward runs

    def join(self) -> None:
        """Let other engines see the models and optimizers of this one, until `end`."""
        _OF_ENGINES[self] = None

    def begin(self) -> None:
        """Notice parameters that modules register from now on, until `end`."""
        self.join()
        _forget_everywhere()
        _NOTICING[self] = None
        notice_registrations()

    def notice(self, module: nn.Module) -> None:
        """Note that `module` has registered a parameter."""
        self._late[module] = None
        self.forget()

    def end(self) -> None:
        """Stop noticing parameters, and forget everything."""
        _forget_everywhere()
        self._late.clear()
        self.scale, self._has_scaled = None, False
        _NOTICING.pop(self, None)
        _OF_ENGINES.pop(self, None)
        notice_registrations()

    def forget(self, *_: Any) -> None:
        """Forget found parameters, to look for them again. Also called when a module or optimizer is collected."""
        self.changes += 1
        self._found.clear()
        self._alive.clear()

    def enter(self, backward: Backward, everyone: list[Stepper]) -> bool:
        """At the start of a scaled backward, set unlisted gradients aside. True if `exit` must be called at its end."""
        self.exit()  # of a backward that raised, or that was compiled
        if not backward.snapshot.is_identity:
            self._has_scaled = True
        others = self._of(everyone)
        if others is None:
            return False
        if others.low:
            self._rescale(others, backward.snapshot)
        window = Window(others.rows) if tensor_lists.any_gradient(others.rows.columns.plain_handle) else None
        own = Backward(backward.scaler, backward.loss_id, backward.snapshot)
        self._running = _Running(others, own, window)
        if window is not None:
            window.open(own)
        return True

    def check_gathered(self, optimizer: Optimizer, joined: Iterable[nn.Parameter], everyone: list[Stepper]) -> None:
        """Raise AmpStateError for a parameter that joined with a gradient which no exit can have unscaled.

        The parameter is in no module that was passed to `initialize` or made since, so it is unknown whether a scaled
        backward left the gradient, and at which scales. Waits for the device.
        """
        if not self._has_scaled:
            return
        known = _ids_in([*_parts_of(self._models()), *_alive_in(self._late)])
        known |= {id(p) for one in everyone for p in one.rows.departed}
        for p in joined:
            if id(p) not in known and not is_zero(p.grad):
                raise AmpStateError(
                    f"A parameter of shape {tuple(p.shape)} joined {type(optimizer).__name__} with a gradient.  It is "
                    "in no module that was passed to amp.initialize or made since, so amp cannot tell whether that "
                    "gradient is multiplied by the loss scale.  Nothing was stepped.  Set its `.grad` to None, or pass "
                    "all modules that are trained to amp.initialize([model, head], ...)."
                )

    def exit(self) -> None:
        """At the end of a scaled backward: unscale gradients that arrived, and have other optimizers check them."""
        if self._running is None:
            return
        others, backward, window = self._running
        if window is None:
            if not tensor_lists.any_gradient(others.rows.columns.plain_handle):
                self._running = None
                return
            window = Window(others.rows)
            window.adopt(backward)
            has_arrived = True
        else:
            has_arrived = window.has_arrived()
        # Look before earlier gradients are put back.
        alive = [one for ref in others.stepped if (one := ref()) is not None] if has_arrived else []
        given = [one for one in alive if tensor_lists.any_gradient(one.rows.columns.plain_handle)]
        for one in given:
            one.is_given_gradients()
        window.close(backward, False)
        self._running = None

    def discard(self) -> None:
        """Put earlier gradients back after a scaled backward raised."""
        if self._running is None:
            return
        others, _, window = self._running
        if window is None:
            tensor_lists.discard_gradients(others.rows.columns.plain_handle)
        else:
            window.discard_backward()
        self._running = None

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
        changes = self.changes  # read first, since another thread may call `forget` meanwhile
        key: tuple[Any, ...]  # of ids, which keep no optimizer or parameter alive
        key = (changes, *[(id(one), one.rows.scans, one.window.is_closed) for one in everyone])
        if len(_OF_ENGINES) > 1:
            key += (None, *[(id(group), len(group["params"])) for group in self._groups_of_other_engines()])
        found = self._found.get(key)
        if found is None:
            if len(self._found) > 64:
                self.forget()
            self._found[key] = found = self._look(everyone)
        return found if found.low or found.rows.columns.plain else None

    def _other_engines(self) -> list[Unlisted]:
        return [one for one in _alive_in(_OF_ENGINES) if one is not self]

    def _groups_of_other_engines(self) -> list[dict[str, Any]]:
        optimizers = [optimizer for one in self._other_engines() for optimizer in one._optimizers()]
        return [group for optimizer in optimizers for group in [*optimizer.param_groups]]

    def _ids_of_other_engines(self) -> set[int]:
        """Return the ids of parameters in models or optimizers of other engines."""
        models = [model for one in self._other_engines() for model in one._models()]
        stepped = {id(p) for group in self._groups_of_other_engines() for p in [*group["params"]]}
        return stepped | _ids_in(_parts_of(models))

    def _look(self, everyone: list[Stepper]) -> _Others:
        owners = [one for one in everyone if not one.window.is_closed]  # some are of this body
        own, late = _parts_of(self._models()), _alive_in(self._late)
        self._alive += [weakref.ref(m, self.forget) for m in (*own, *late)]
        self._alive += [weakref.ref(one.optimizer, self.forget) for one in everyone]
        makes_masters = any(one.rows.makes_masters for one in everyone)
        owned = {id(p) for one in owners for p in one.rows.columns.params}
        others = [one for one in everyone if one not in owners]
        found = [*_params_in(own), *(p for one in others for p in one.rows.columns.plain)]
        loose = [*_params_in(late), *(p for one in everyone for p in one.rows.departed)]
        if loose:
            theirs = self._ids_of_other_engines().difference(map(id, found))
            found += [p for p in loose if id(p) not in theirs]
        # A parameter with a master belongs to its optimizer: gradients reach the master only through `scale_loss`.
        free = [
            p
            for p in {id(p): p for p in found}.values()
            if (p.is_floating_point() or p.is_complex()) and id(p) not in owned and not any(masters_of(p))
        ]
        low = [p for p in free if makes_masters and is_low_precision(p)]
        plain = [p for p in free if not (makes_masters and is_low_precision(p))]
        return _Others(low, plain, [weakref.ref(one) for one in others])


# Engines that have models or optimizers, and engines that notice registrations. Other threads may change these
# dictionaries and those of modules: so a list is made of one, which is atomic, before a loop.
_OF_ENGINES: weakref.WeakKeyDictionary[Unlisted, None] = weakref.WeakKeyDictionary()
_NOTICING: weakref.WeakKeyDictionary[Unlisted, None] = weakref.WeakKeyDictionary()
_HOOKS: list[RemovableHandle] = []  # has one handle while an engine notices registrations


def notice_registrations() -> None:
    """Add a hook to torch if an engine notices registrations, and remove it if none does.

    Not called when an engine is collected, which may happen while torch iterates over its hooks.
    """
    if _NOTICING and not _HOOKS:
        _HOOKS.append(register_module_parameter_registration_hook(_registered))
    while _HOOKS and not _NOTICING:
        _HOOKS.pop().remove()


def _registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if param is not None:
        for one in _alive_in(_NOTICING):
            one.notice(module)


def _forget_everywhere() -> None:
    for one in _alive_in(_OF_ENGINES):
        one.forget()


def _alive_in(entries: weakref.WeakKeyDictionary[T, None]) -> list[T]:
    return [one for ref in entries.keyrefs() if (one := ref()) is not None]


def _parts_of(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the models and all modules inside of them."""
    found: dict[int, nn.Module] = {}
    left = [*models]
    while left:
        module = left.pop()
        if id(module) not in found:
            found[id(module)] = module
            left += [part for part in [*module._modules.values()] if part is not None]
    return list(found.values())


def _params_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [p for m in modules for p in [*m._parameters.values()] if p is not None]


def _ids_in(modules: Iterable[nn.Module]) -> set[int]:
    return set(map(id, _params_in(modules)))
