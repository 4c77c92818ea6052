"""Mixed precision by hand: what amp_engine promises, in plain PyTorch, one tensor at a time.

Nothing here imports `amp_engine`. A parameter is known by its name, `m0.a.weight`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.scaling import Scaler, Window
from tests.plain import cast_model

HALF = {"O1": torch.float16, "O2": torch.float16, "O3": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}


class Reference:
    """Models, optimizers and loss scales at one level. Models come in FP32 and are copied."""

    def __init__(self, models: list[Any], groups: Any, make: list[Any], scalers: list[Scaler], start: Any) -> None:
        level = start["level"]
        self.level, self.scalers = level, scalers
        self.arrives = arrives = getattr(torch, start.get("half") or "float32")
        casts = level not in ("O1", "O4")
        self.by_master = level in ("O2", "O5") or (arrives is not torch.float32 and not casts)
        self.skips = start["skips"] is True or (start["skips"] == "auto" and HALF.get(level) is torch.bfloat16)
        self.dtype = HALF[level] if level in ("O2", "O3", "O5") else torch.float32
        self.models = [
            cast_model(m, self.dtype, keep_batchnorm=self.by_master) if casts else copy.deepcopy(m) for m in models
        ]
        for model in self.models:
            for part in model.modules() if casts and self.by_master else ():
                if isinstance(part, nn.BatchNorm1d):
                    part.float()
            model.half = HALF[level] if level in ("O1", "O4") else None
        self.groups: list[list[list[str]]] = groups
        self.optimizers = [
            new([{"params": [self.params[n] for n in group]} for group in own])
            for new, own in zip(make, groups, strict=True)
        ]
        self.masters: dict[str, nn.Parameter] = {}  # of those low-precision parameters that an optimizer has
        self.home: dict[str, int | None] = {}  # their optimizers; None: they left their groups
        self.windows: list[Window | None] = [None for _ in groups]
        self.overflowed, self.skipped = [False for _ in groups], [False for _ in groups]
        self.losses = 0  # at a scale of 1
        self.passed: list[int | None] = [None for _ in groups]  # the last of them whose gradients were not looked at
        self.looked: list[list[Any] | None] = [None for _ in groups]  # gradients that were looked at, with versions
        self.left = [False for _ in groups]  # whether the last step was skipped, and gradients of it may be there
        self.scanned: list[Any] = [None for _ in groups]  # groups, and which have masters, as they were looked at last
        self.moved: set[str] = set()  # parameters that the user wrote since their masters looked last
        self.added: set[str] = set()  # to a group, since masters were looked for
        self.regrouped: set[int] = set()  # optimizers whose groups lost something since
        self.written: set[str] = set()  # and masters that the user wrote since they were rounded last
        self.hooks: list[list[Any]] = [[] for _ in groups]  # of the user's, before steps
        self.deferred: set[int] = set()  # optimizers whose next step does the clipping
        self.clipped: set[int] = set()  # optimizers whose gradients, and what follows, are right but for rounding
        exact = {f"m{i}.{n}": p.detach() for i, m in enumerate(models) for n, p in m.named_parameters()}
        for o in range(len(groups)):
            self.scan(o, exact)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return {f"m{i}.{name}": p for i, m in enumerate(self.models) for name, p in m.named_parameters()}

    def names(self, o: int) -> list[str]:
        return [name for group in self.groups[o] for name in group]

    def entry(self, name: str) -> nn.Parameter:
        """Return the weight that the optimizer steps."""
        return self.masters[name] if self.is_owned(name) and name not in self.added else self.params[name]

    def is_owned(self, name: str) -> bool:
        """True if an optimizer steps a master; one that left its groups has the value of its parameter only."""
        return name in self.masters and self.home[name] is not None

    def params_of(self, o: int) -> list[nn.Parameter]:
        """Return the model's parameters that an optimizer steps; they have the gradients."""
        return [self.params[name] for name in self.names(o)]

    @property
    def is_scaled(self) -> bool:
        return self.scalers[0].dynamic or self.scalers[0].scale != 1.0

    def forward(self, m: int, x: Tensor, *args: Any) -> Tensor:
        cast = self.level in ("O2", "O3", "O5")
        with torch.no_grad():
            for name in [name for name in self.written - self.moved if self.is_owned(name)]:
                self.params[name].copy_(self.masters[name])
                self.written.discard(name)
        return self.models[m](x.to(self.dtype), *args).float() if cast else self.models[m](x, *args)

    @torch.no_grad()
    def scan(self, o: int, exact: dict[str, Tensor] | None = None) -> None:
        """Low-precision parameters of the groups that require a gradient have masters."""
        optimizer = self.optimizers[o]
        gone = [name for name, home in self.home.items() if home == o and name not in self.names(o)]
        gone += [name for name in self.added if name in self.masters and not self.params[name].requires_grad]
        for name in gone:
            self.home[name] = None
        self.added.difference_update(self.names(o))
        self.regrouped.discard(o)
        for name in self.names(o) if self.by_master else ():
            param = self.params[name]
            if not self.is_owned(name) and param.dtype != torch.float32 and param.requires_grad:
                if name not in self.masters:
                    self.masters[name] = nn.Parameter((exact or self.params)[name].float().clone())
                    self.moved.discard(name)
                param.grad_dtype = None  # its gradient may be FP32
                self.home[name] = o
                if param in optimizer.state:
                    optimizer.state[self.masters[name]] = optimizer.state.pop(param)
        for group, names in zip(optimizer.param_groups, self.groups[o], strict=True):
            group["params"] = [self.entry(name) for name in names]
        now = [[(name, self.is_owned(name)) for name in group] for group in self.groups[o]]
        if now != self.scanned[o]:
            self.scanned[o], self.looked[o] = now, None

    def scan_open(self, optimizers: list[int]) -> None:
        """Look in optimizers whose windows were left open for parameters in common with these."""
        for o, window in enumerate(self.windows):
            if window is not None and o not in optimizers:
                self.scan(o)

    @torch.no_grad()
    def refresh(self, o: int) -> None:
        """Masters follow parameters that the user wrote."""
        for name in [name for name in self.names(o) if self.is_owned(name) and name in self.moved]:
            self.masters[name].copy_(self.merged(name))
            self.moved.discard(name)
            self.written.discard(name)

    def merged(self, name: str) -> Tensor:
        """The master where it rounds to the parameter, else the parameter."""
        param, master = self.params[name].detach(), self.masters[name].detach()
        return torch.where(param != master.to(param.dtype), param.float(), master)

    @torch.no_grad()
    def exact(self, name: str) -> Tensor:
        """The FP32 value of a parameter that training goes on from, and that a checkpoint has."""
        if name not in self.masters:
            return self.params[name].float()
        is_written = name in self.written and name not in self.moved
        return self.masters[name].detach() if is_written else self.merged(name)

    @torch.no_grad()
    def saved(self, name: str) -> Tensor:
        """What a checkpoint has: the FP32 value of a parameter, or itself if it came in its type and has no master."""
        param = self.params[name]
        return param.detach() if name not in self.masters and param.dtype is self.arrives else self.exact(name)

    @torch.no_grad()
    def write_back(self, o: int, only: set[str] | None = None) -> None:
        for name in [name for name in self.names(o) if self.is_owned(name) and (only is None or name in only)]:
            self.params[name].copy_(self.masters[name])
            self.written.discard(name)

    # --- gradients: those of the model's parameters, FP32 beside a master where a scaled loss or a clip left them ----

    def gradients(self, o: int) -> list[Any]:
        """The gradients of an optimizer, with their versions."""
        grads = [param.grad for param in self.params_of(o)]
        return [(grad, -1 if grad is None else grad._version) for grad in grads]

    def has_gradients(self, o: int) -> bool:
        return any(param.grad is not None for param in self.params_of(o))

    def is_looked(self, o: int) -> bool:
        return self.looked[o] is not None and is_same(self.gradients(o), self.looked[o])

    @torch.no_grad()
    def widen(self, o: int, only: set[str] | None = None) -> None:
        """Gradients beside masters become FP32: all, or those that are named."""
        was_looked = self.is_looked(o)
        for name in [name for name in self.names(o) if self.is_owned(name) and (only is None or name in only)]:
            grad = self.params[name].grad
            if grad is not None and grad.dtype != torch.float32:
                self.params[name].grad = None
                self.params[name].grad = grad.float()
        if was_looked:
            self.looked[o] = self.gradients(o)

    def forget(self, o: int) -> None:
        """What was found of gradients that are gone decides no step."""
        self.overflowed[o], self.passed[o], self.looked[o] = False, None, None

    def enter_passed(self, optimizers: list[int]) -> None:
        """At a scale of 1 gradients stay where they are; earlier ones become FP32, but for views of other memory."""
        for o in optimizers:
            self.scan(o)
            if self.has_gradients(o):
                grads = {name: self.params[name].grad for name in self.names(o)}
                self.widen(o, {n for n, g in grads.items() if g is not None and not g._is_view()})
            else:
                self.forget(o)

    def leave_passed(self, optimizers: list[int]) -> None:
        """They are looked at later, with those of all optimizers of their loss."""
        self.losses += 1
        for o in optimizers:
            self.passed[o] = self.losses if self.skips else None

    def look(self, o: int, is_stepping: bool = False) -> None:
        """Before a step or a clip: gradients that came, or were written, since the last look decide."""
        if not self.has_gradients(o) or not (self.skips or self.scalers[0].dynamic):
            return
        if not (is_stepping and self.left[o]) and self.is_looked(o):
            return
        together = [one for one, loss in enumerate(self.passed) if one == o or (loss and loss == self.passed[o])]
        found = [grad for one in together for grad, _ in self.gradients(one) if grad is not None]
        overflowed = not all(bool(grad.isfinite().all()) for grad in found)
        for one in together:
            self.overflowed[one] = overflowed
            self.left[one], self.passed[one], self.looked[one] = False, None, self.gradients(one)

    def enter(self, optimizers: list[int], loss_id: int) -> float:
        """Returns the scale of the loss: it has one, and windows of others close."""
        self.scan_open(optimizers)
        left = [(o, window.writes) for o in optimizers if (window := self.windows[o])]
        for o in [o for o, _ in left if not self.has_gradients(o)]:
            self.windows[o] = None
            self.forget(o)
        left = [(o, writes) for o, writes in left if self.windows[o]]
        for o in [o for o, writes in left if writes != left[0][1]]:
            self.exit([o], loss_id)
        for o in optimizers:
            self.scan(o)
            if not self.has_gradients(o):
                self.forget(o)
        scaler = self.scalers[loss_id]
        return next((w.scale for o in optimizers if (w := self.windows[o])), scaler.scale)

    def begin(self, optimizers: list[int], loss_id: int, scale: float) -> None:
        """The backward begins: set earlier gradients aside, and look at those that nobody has looked at."""
        writes = next((w.writes for o in optimizers if (w := self.windows[o])), self.scalers[loss_id].writes)
        for o in [o for o in optimizers if self.windows[o] is None]:
            earlier = {name: g for name in self.names(o) if (g := self.params[name].grad) is not None}
            unseen = bool(earlier) and not self.is_looked(o)
            if unseen or not earlier:
                self.overflowed[o] = False
            bad = unseen and not all(bool(g.isfinite().all()) for g in earlier.values())
            self.windows[o] = Window(scale, loss_id, writes, earlier, bad)
            for param in self.params_of(o):
                param.grad = None

    def has_earlier(self, optimizers: list[int]) -> bool:
        """True if there are unscaled gradients, other than 0, beside those of the bodies of `optimizers`."""
        windows = [window for o in optimizers if (window := self.windows[o])]
        return any(bool(grad.any()) for window in windows for grad in window.earlier.values())

    def delay(self, optimizers: list[int]) -> None:
        """Leave gradients scaled; earlier ones of 0 go back to where none came."""
        for o in optimizers:
            window = self.windows[o]
            assert window is not None
            for name, grad in window.earlier.items():
                if self.params[name].grad is None:
                    self.params[name].grad = grad.to(self.params[name].dtype)
            window.earlier = {}

    @torch.no_grad()
    def exit(self, optimizers: list[int], loss_id: int, late_check: bool = False) -> None:
        """Unscale, add, look for overflows, move the scale."""
        scaler = self.scalers[loss_id]
        overflowed = scaler.overflowed
        for o in optimizers:
            window, self.windows[o] = self.windows[o], None
            assert window is not None
            overflowed |= window.bad
            for name in self.names(o):
                param, total = self.params[name], window.earlier.get(name)
                wide = torch.float32 if self.is_owned(name) else param.dtype
                total = None if total is None else total.to(wide)
                if param.grad is not None:
                    overflowed |= not bool(param.grad.isfinite().all())
                    grad = (param.grad.float() / window.scale).to(wide)
                    total = grad if total is None else total + grad
                param.grad = None
                param.grad = total
            self.left[o], self.passed[o], self.looked[o] = False, None, self.gradients(o)
        scaler.overflowed = overflowed and late_check
        if not late_check:
            scaler.update(overflowed)
            for o in optimizers:
                self.overflowed[o] |= overflowed and (scaler.dynamic or self.skips)

    def abandon(self, optimizers: list[int], reentered: dict[int, list[Any]], began: bool) -> None:
        """Gradients as they were at the entry; what a backward added to scaled ones cannot be told apart."""
        for o in optimizers if began else ():
            if reentered.get(o) == self.marks(o):
                continue
            window, self.windows[o] = self.windows[o], None
            assert window is not None
            for name in self.names(o):
                self.params[name].grad = None
                self.params[name].grad = window.earlier.get(name)
            self.looked[o] = None

    def marks(self, o: int) -> list[Any]:
        """Equal to those of before if no backward wrote in between."""
        return [None if grad is None else (id(grad), version) for grad, version in self.gradients(o)]

    def step(self, o: int) -> bool:
        """Returns False for a step that is refused, since no loss scale has multiplied its half gradients."""
        self.scan_open([o])
        self.scan(o)
        self.write_back(o, self.written - self.moved)
        self.refresh(o)
        if (window := self.windows[o]) is not None:
            self.exit([o], window.loss_id)
        for hook in self.hooks[o]:
            hook(self.params_of(o))
        if self.is_scaled and any(self.has_half(name) for name in self.names(o)):
            return False
        self.look(o, is_stepping=True)
        if self.are_gone(o):
            self.overflowed[o] = False  # what was found of gradients goes with them
        self.skipped[o], self.overflowed[o] = self.overflowed[o], False
        self.left[o], self.passed[o], self.looked[o] = self.skipped[o], None, None
        if not self.skipped[o]:
            mine = [name for name in self.names(o) if self.is_owned(name)]
            for name in mine:
                grad = self.params[name].grad
                self.masters[name].data.copy_(self.merged(name))  # writes that moved no version
                self.masters[name].grad = None if grad is None else grad.float()
            self.optimizers[o].step()
            self.write_back(o)
            for name in mine:
                self.masters[name].grad = None
        return True

    def are_gone(self, o: int) -> bool:
        """True if there were gradients when they were last checked, and there are none now."""
        had = any(grad is not None for grad, _ in self.looked[o] or ())
        return had and all(self.params[name].grad is None for name in self.names(o))

    def has_half(self, name: str) -> bool:
        """True if no scaled loss left the gradient; one of zeros has no scale."""
        grad = self.params[name].grad
        return self.is_owned(name) and grad is not None and grad.dtype != torch.float32 and bool(grad.any())

    def zero_grad(self, o: int, set_to_none: bool) -> None:
        zero(self.params_of(o), set_to_none)


def zero(params: Any, set_to_none: bool) -> None:
    for param in params:
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad.zero_()


def is_same(now: list[Any], before: list[Any]) -> bool:
    """True if these are the same gradients, which nobody has written."""
    return len(now) == len(before) and all(
        grad is earlier and version == then for (grad, version), (earlier, then) in zip(now, before, strict=True)
    )
