"""Mixed precision by hand: what amp_engine promises, in plain PyTorch, one tensor at a time.

Nothing here imports `amp_engine`. A parameter is known by its name, `m0.a.weight`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.fuzz.scaling import Scaler, Window
from tests.plain import cast_model

HALF = {"O1": torch.float16, "O2": torch.float16, "O3": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}


class Reference:
    """Models, optimizers and loss scales at one level. Models come in FP32 and are copied."""

    def __init__(self, models: list[Any], groups: Any, make: list[Any], scalers: list[Scaler], start: Any) -> None:
        level, self.adopt = start["level"], start["adopt"]
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
        self.home: dict[str, int] = {}  # their optimizers
        self.windows: list[Window | None] = [None for _ in groups]
        self.overflowed, self.skipped = [False for _ in groups], [False for _ in groups]
        self.seen = [False for _ in groups]  # whether there was a backward since the last step
        self.left = [False for _ in groups]  # whether the last step was skipped, and none was since
        self.losses = 0  # at a scale of 1 without masters
        self.passed: list[int | None] = [None for _ in groups]  # the last of them whose gradients were not looked at
        self.looked: list[list[Any]] = [[] for _ in groups]  # gradients that were looked at, with their versions
        self.moved: set[str] = set()  # parameters that the user wrote since their masters looked last
        self.added: set[str] = set()  # to a group, since masters were looked for
        self.regrouped: set[int] = set()  # optimizers whose groups lost something since
        self.written: set[str] = set()  # and masters that the user wrote since they were rounded last
        self.relaid: set[str] = set()  # parameters with other memory since their masters looked last
        self.spent: set[str] = set()  # parameters whose masters' gradients a step discarded, and no zero_grad since
        self.hooks: list[list[Any]] = [[] for _ in groups]  # of the user's, before steps
        self.fresh: set[int] = set(range(len(groups)))  # optimizers whose masters have not looked yet
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
        return self.masters[name] if name in self.masters and name not in self.added else self.params[name]

    def forward(self, m: int, x: Tensor, *args: Any) -> Tensor:
        cast = self.level in ("O2", "O3", "O5")
        with torch.no_grad():  # also of those that have left their group since
            for name in [name for name in self.written - self.moved if name in self.masters]:
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
            del self.masters[name], self.home[name]
        self.added.difference_update(self.names(o))
        self.regrouped.discard(o)
        for name in self.names(o) if self.by_master else ():
            param = self.params[name]
            if name not in self.masters and param.dtype != torch.float32 and param.requires_grad:
                self.masters[name] = nn.Parameter((exact or self.params)[name].float().clone())
                self.home[name] = o
                self.moved.discard(name)
                if param in optimizer.state:
                    optimizer.state[self.masters[name]] = optimizer.state.pop(param)
        for group, names in zip(optimizer.param_groups, self.groups[o], strict=True):
            group["params"] = [self.entry(name) for name in names]

    def scan_open(self, optimizers: list[int]) -> None:
        """Look in optimizers whose windows were left open for parameters in common with these."""
        for o, window in enumerate(self.windows):
            if window is not None and o not in optimizers:
                self.scan(o)

    @torch.no_grad()
    def refresh(self, o: int) -> None:
        """Masters follow parameters that the user wrote; the first time also what was written unseen."""
        if o in self.fresh:
            self.take_over(o)
            self.fresh.discard(o)
        if dist.is_initialized():  # other memory may hold other values on each rank, so masters take them whole
            self.moved |= self.relaid.intersection(self.names(o))
        for name in [name for name in self.names(o) if name in self.masters and name in self.moved]:
            self.masters[name].copy_(self.params[name])
            self.moved.discard(name)
            self.written.discard(name)
        self.relaid.difference_update(self.names(o))

    def settle(self, o: int) -> None:
        """Bring masters up to date before a step or a save, also with unseen writes, if that was asked for."""
        self.scan(o)
        self.refresh(o)
        if self.adopt:
            self.take_over(o)

    @torch.no_grad()
    def exact(self, name: str) -> Tensor:
        """The FP32 value of a parameter that training goes on from."""
        param, master = self.params[name], self.masters.get(name)
        if master is None or name in self.moved:
            return param.float()
        looks = name not in self.written and (self.adopt or self.home[name] in self.fresh)
        return torch.where(param != master.to(param.dtype), param.float(), master) if looks else master.detach()

    @torch.no_grad()
    def saved(self, name: str) -> Tensor:
        """What a checkpoint has: the FP32 value of a parameter, or itself if it came in its type and has no master."""
        param, master = self.params[name], self.masters.get(name)
        if master is None:
            return param.detach() if param.dtype is self.arrives else param.float()
        if name in self.moved:
            return param.float()
        if name in self.written:
            return master.detach()
        return torch.where(param != master.to(param.dtype), param.float(), master)

    def take_over(self, o: int) -> None:
        for name in [name for name in self.names(o) if name in self.masters and name not in self.written]:
            self.masters[name].data = self.exact(name)

    @torch.no_grad()
    def write_back(self, o: int, only: set[str] | None = None) -> None:
        for name in [name for name in self.names(o) if name in self.masters and (only is None or name in only)]:
            self.params[name].copy_(self.masters[name])
            self.written.discard(name)

    def passes_through(self, optimizers: list[int], loss_id: int) -> bool:
        scaler = self.scalers[loss_id]
        works = scaler.dynamic or scaler.scale != 1.0 or self.by_master
        return not works and all(self.windows[o] is None for o in optimizers)

    def enter_passed(self, optimizers: list[int]) -> None:
        """Where there is nothing to scale gradients stay where they are."""
        for o in optimizers:
            if all(self.params[name].grad is None for name in self.names(o)):
                self.passed[o] = None

    def leave_passed(self, optimizers: list[int]) -> None:
        """They are looked at later, with those of all optimizers of their loss."""
        self.losses += 1
        for o in optimizers:
            self.passed[o] = self.losses

    def look(self, o: int, is_stepping: bool = False) -> None:
        """Before a step or a clip where there is nothing to scale: gradients that came since the last look decide."""
        now = self.gradients(o)
        if not (self.skips and self.passes_through([o], 0)) or all(grad is None for grad, _ in now):
            return
        if not (is_stepping and self.left[o]) and is_same(now, self.looked[o]):
            return
        together = [one for one, loss in enumerate(self.passed) if one == o or (loss and loss == self.passed[o])]
        found = [grad for one in together for grad, _ in self.gradients(one) if grad is not None]
        overflowed = not all(bool(grad.isfinite().all()) for grad in found)
        for one in together:
            self.overflowed[one] |= overflowed
            self.left[one], self.passed[one], self.looked[one] = False, None, self.gradients(one)

    def gradients(self, o: int) -> list[Any]:
        """The gradients of an optimizer, with their versions."""
        grads = [self.params[name].grad for name in self.names(o)]
        return [(grad, -1 if grad is None else grad._version) for grad in grads]

    def enter(self, optimizers: list[int], loss_id: int, heed: bool = True) -> float:
        """Set earlier gradients aside. Returns the scale of the loss: it has one, and windows of others close.

        Args:
            heed: a backward follows, so that what `zero_grad` was to reach goes.
        """
        self.scan_open(optimizers)
        left = [(o, window.writes) for o in optimizers if (window := self.windows[o])]
        for o in [o for o, writes in left if writes != left[0][1]]:
            self.exit([o], loss_id)
        for o in optimizers:
            self.scan(o)
            self.refresh(o)
            if heed:
                self.heed_zero_grad(o)
        scaler = self.scalers[loss_id]
        scale, writes = next(
            ((w.scale, w.writes) for o in optimizers if (w := self.windows[o])), (scaler.scale, scaler.writes)
        )
        for o in [o for o in optimizers if self.windows[o] is None]:
            earlier = {name: g for name in self.names(o) if (g := self.entry(name).grad) is not None}
            self.windows[o] = Window(scale, loss_id, writes, earlier)
            for name in self.names(o):
                self.params[name].grad = self.entry(name).grad = None
        return scale

    @torch.no_grad()
    def exit(self, optimizers: list[int], loss_id: int, late_check: bool = False) -> None:
        """Unscale, add, look for overflows, move the scale."""
        scaler = self.scalers[loss_id]
        overflowed = scaler.overflowed
        for o in optimizers:
            self.heed_zero_grad(o)
            window, self.windows[o] = self.windows[o], None
            for name in self.names(o) if window else ():
                param, entry, total = self.params[name], self.entry(name), window.earlier.get(name)
                if total is not None and entry is param and not self.seen[o]:
                    overflowed |= not bool(total.isfinite().all())
                if param.grad is not None:
                    overflowed |= not bool(param.grad.isfinite().all())
                    grad = (param.grad.float() / window.scale).to(entry.dtype)
                    total = grad if total is None else total + grad
                entry.grad = total
            self.seen[o], self.left[o] = True, False
        scaler.overflowed = overflowed and late_check
        if not late_check:
            scaler.update(overflowed)
            for o in optimizers:
                self.overflowed[o] |= overflowed and (scaler.dynamic or self.skips)

    def abandon(self, optimizers: list[int], reentered: dict[int, list[Any]]) -> None:
        """Gradients as they were at the entry; what a backward added to scaled ones cannot be told apart."""
        for o in optimizers:
            if reentered.get(o) == self.marks(o):
                continue
            window, self.windows[o] = self.windows[o], None
            for name in self.names(o):
                self.params[name].grad = None
                self.entry(name).grad = window.earlier.get(name) if window else None

    def marks(self, o: int) -> list[Any]:
        """Equal to those of before if no backward wrote in between."""
        grads = [self.params[name].grad for name in self.names(o)]
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    def step(self, o: int) -> None:
        self.scan_open([o])
        self.scan(o)
        if (window := self.windows[o]) is not None:
            self.exit([o], window.loss_id)
        elif (
            self.left[o]
            and not self.passes_through([o], 0)
            and any(self.entry(name).grad is not None for name in self.names(o) if name not in self.masters)
        ):
            self.enter([o], 0)
            self.exit([o], 0)
        for hook in self.hooks[o]:
            hook(self.optimizers[o], (), {})
        self.look(o, is_stepping=True)
        self.skipped[o], self.overflowed[o] = self.overflowed[o], False
        self.seen[o], self.left[o] = False, self.skipped[o]
        self.passed[o], self.looked[o] = None, self.looked[o] if self.skipped[o] else []
        self.scan(o)
        self.write_back(o, self.written - self.moved)
        self.settle(o)
        if not self.skipped[o]:
            self.optimizers[o].step()
            self.write_back(o)
        for name in [name for name, home in self.home.items() if home == o]:
            if self.masters[name].grad is not None:
                self.spent.add(name)
            self.params[name].grad = self.masters[name].grad = None

    def has_spent(self, o: int) -> bool:
        """True if masters' gradients were discarded by a step, which `zero_grad` in place would make 0."""
        return self.by_master and (not self.seen[o] or not all(map(self._has_gradient, self.spent & {*self.names(o)})))

    def _has_gradient(self, name: str) -> bool:
        earlier = any(name in window.earlier for window in self.windows if window is not None)
        return earlier or self.entry(name).grad is not None or self.params[name].grad is not None

    def zero_grad(self, o: int, set_to_none: bool) -> None:
        self.optimizers[o].zero_grad(set_to_none)
        if set_to_none:
            self.spent.difference_update(self.names(o))
        if (window := self.windows[o]) is not None:  # everything of before and of now
            window.zero(self.names(o), self.params, set_to_none)
            window.in_place = not set_to_none and (window.in_place or not window.zeroed)
            window.zeroed = True

    def zero_grad_in_body(self, o: int, set_to_none: bool, is_reentered: bool, heed: bool) -> None:
        """Zero before a backward begins: earlier gradients go; those of an open window when it is looked at next."""
        window = self.windows[o]
        if is_reentered:
            self.zero_grad(o, set_to_none)
            if heed:
                self.heed_zero_grad(o)
        elif window is not None:
            window.earlier = {} if set_to_none else {n: torch.zeros_like(g) for n, g in window.earlier.items()}
        else:
            self.optimizers[o].zero_grad(set_to_none)

    def heed_zero_grad(self, o: int) -> None:
        if (window := self.windows[o]) is not None and window.zeroed:
            window.zeroed = False
            for name in [name for name in self.names(o) if name in self.masters]:
                if window.in_place and self.params[name].grad is not None:
                    window.earlier[name] = torch.zeros_like(self.masters[name])
                self.params[name].grad = self.masters[name].grad = None


def is_same(now: list[Any], before: list[Any]) -> bool:
    """True if these are the same gradients, which nobody has written."""
    return len(now) == len(before) and all(
        grad is earlier and version == then for (grad, version), (earlier, then) in zip(now, before, strict=True)
    )
