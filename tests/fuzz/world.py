"""amp_engine beside its reference, and what must agree between the two."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import amp
from tests.fuzz import lifecycle
from tests.fuzz.models import OPTIMIZERS, batch, loss_of, make_model
from tests.fuzz.reference import Reference
from tests.fuzz.scaling import Scaler
from tests.support import weights_of


class MismatchError(AssertionError):
    """amp_engine and the reference disagree."""


class World:
    """One run: models and optimizers in amp's care, and the same in the reference's.

    Args:
        start: level, models, optimizers and what else `initialize` is told; plain data.
    """

    def __init__(self, start: dict[str, Any]) -> None:
        self.start = start
        self.models, self.plain = self._make_models(0), self._make_models(0)
        self.kinds = [kind for kind, _, _ in start["optimizers"]]
        self.groups: list[list[list[str]]] = []
        for _, owned, split in start["optimizers"]:
            names = [f"m{i}.{name}" for i in owned for name, _ in self.models[i].named_parameters()]
            self.groups.append({"one": [names], "two": [names[:1], names[1:]], "part": [names[:-1]]}[split])
        self.optimizers = self._make_optimizers()
        self.saved: list[Any] = []
        self.attic: list[Any] = []  # engines that were not closed
        self.averages: dict[int, tuple[Any, dict[str, Tensor]]] = {}  # of models, and what their weights are to be
        self.hooks: list[tuple[int, Any]] = []  # the user's, before steps: of which optimizer, and their handles
        self.initialize(start)

    @property
    def half(self) -> torch.dtype | None:
        """The type that models arrive in; None: float32."""
        return getattr(torch, self.start.get("half") or "", None)

    def _make_models(self, seed: int) -> list[Any]:
        models: list[Any] = [make_model(kind, seed + i) for i, kind in enumerate(self.start["models"])]
        for model, last in zip(models, self.start["channels_last"], strict=True):
            if last:
                model.to(memory_format=torch.channels_last)
            if self.half is not None:
                model.to(self.half)
        params = [p for model in models for p in model.parameters()]
        for which in self.start["frozen"]:
            params[which % len(params)].requires_grad_(False)
        return models

    def _make_optimizers(self) -> list[Optimizer]:
        return [
            OPTIMIZERS[kind][0](self._engine_groups(groups))
            for kind, groups in zip(self.kinds, self.groups, strict=True)
        ]

    def renew(self) -> None:
        """Fresh models and optimizers in amp's care, with the groups of now."""
        grads = {name: p.requires_grad for name, p in self.params.items()}
        self.models = self._make_models(100)
        self.averages.clear()
        for name, p in self.params.items():
            p.requires_grad_(grads[name])
        self.optimizers = self._make_optimizers()
        self.hooks.clear()
        self._initialize_engine()

    def _engine_groups(self, groups: list[list[str]]) -> list[dict[str, Any]]:
        params = self.params
        return [{"params": [params[name] for name in group]} for group in groups]

    def initialize(self, start: dict[str, Any]) -> None:
        """Take models and optimizers in, on both sides, as they are in `plain` and `groups`."""
        self.start, self.level = start, start["level"]
        self._initialize_engine()
        dynamic = start["loss_scale"] == "dynamic" or (start["loss_scale"] is None and self.level in ("O1", "O2"))
        first = min(2.0**16, start["max_loss_scale"]) if dynamic else float(start["loss_scale"] or 1.0)
        scalers = [Scaler(first, dynamic, start["window"], start["max_loss_scale"]) for _ in self.engine.scalers]
        make = [OPTIMIZERS[kind][1] for kind in self.kinds]
        hooks = self.ref.hooks if hasattr(self, "ref") else [[] for _ in self.groups]
        self.ref = Reference(self.plain, self.groups, make, scalers, start)
        self.ref.hooks = hooks
        self.inexact = {o for o, kind in enumerate(self.kinds) if not OPTIMIZERS[kind][2]}
        self.rounded = set(self.inexact)  # of which optimizers weights may differ by rounding, until the next check

    def _initialize_engine(self) -> None:
        start = self.start
        amp.initialize(
            self.models,
            self.optimizers,
            opt_level=self.level,
            num_losses=start["num_losses"],
            loss_scale=start["loss_scale"],
            max_loss_scale=start["max_loss_scale"],
            skip_on_overflow=start["skips"],
            master_weights=True if self.half is not None and self.level in ("O1", "O4") else None,
            verbosity=0,
        )
        for scaler in self.engine.scalers:
            scaler._scale_seq_len = start["window"]

    # --- what actions ask -------------------------------------------------------------------------

    @property
    def engine(self) -> Any:
        return amp._amp_state.engine

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return {f"m{i}.{name}": p for i, m in enumerate(self.models) for name, p in m.named_parameters()}

    def entries(self, o: int) -> list[nn.Parameter]:
        """Return the weights that amp's optimizer steps, without a look that changes anything."""
        columns = self.record(o).columns
        weights = dict(zip(map(id, columns.params), columns.weights, strict=True))
        return [weights.get(id(p), p) for group in self.optimizers[o].param_groups for p in group["params"]]

    def record(self, o: int) -> Any:
        return self.engine.records.get(self.optimizers[o])

    def params_of(self, o: int) -> list[nn.Parameter]:
        """The model's parameters that an optimizer steps; they have the gradients."""
        return [self.params[name] for name in self.ref.names(o)]

    def entry(self, name: str) -> nn.Parameter | None:
        """Return the weight that amp's optimizer steps for a parameter; None if there is none."""
        for o in range(len(self.optimizers)):
            for own, entry in zip(self.ref.names(o), self.entries(o), strict=True):
                if own == name:
                    return entry
        return None

    def owner(self, name: str) -> int | None:
        return next((o for o in range(len(self.optimizers)) if name in self.ref.names(o)), None)

    def owned(self, o: int) -> list[int]:
        """The models of an optimizer."""
        return self.start["optimizers"][o][1]

    def is_open(self, o: int | None = None) -> bool:
        """True if a window of scaled gradients is open."""
        return any(window is not None for i, window in enumerate(self.ref.windows) if o is None or i == o)

    def outputs(self, m: int, seed: int, *args: Any) -> tuple[Tensor, Tensor]:
        """A forward of both sides, compared."""
        x = batch(self.models[m], seed)
        ours, plain = self.models[m](x, *args), self.ref.forward(m, x, *args)
        self.same(ours, plain, f"output of m{m}")
        return ours, plain

    def losses(self, m: int, seed: int, *args: Any) -> tuple[Tensor, Tensor]:
        ours, plain = self.outputs(m, seed, *args)
        return loss_of(ours, seed), loss_of(plain, seed)

    # --- comparing --------------------------------------------------------------------------------

    def same(self, ours: Any, plain: Any, what: str, rtol: float = 0.0, atol: float = 0.0) -> None:
        if ours is None or plain is None:
            if ours is not plain:
                raise MismatchError(f"{what}: {_short(ours)}, expected {_short(plain)}")
            return
        if not isinstance(ours, Tensor) or not isinstance(plain, Tensor):
            if float(ours) != float(plain):
                raise MismatchError(f"{what}: {ours}, expected {plain}")
            return
        ours, plain = ours.detach(), plain.detach()
        if ours.dtype != plain.dtype or ours.shape != plain.shape:
            raise MismatchError(
                f"{what}: {ours.dtype} {tuple(ours.shape)}, expected {plain.dtype} {tuple(plain.shape)}"
            )
        if torch.equal(ours, plain):
            return
        if not torch.allclose(ours.double(), plain.double(), rtol=rtol, atol=atol, equal_nan=True):
            raise MismatchError(f"{what}: {_short(ours)}, expected {_short(plain)}")

    def check(self, look: bool) -> None:
        """Compare everything; gradients and state of optimizers, where looking changes how a step runs, if asked."""
        with torch.no_grad():
            self._check_weights()
        for i, (scaler, plain) in enumerate(zip(self.engine.scalers, self.ref.scalers, strict=True)):
            self.same(scaler.loss_scale(), plain.scale, f"scale of loss {i}")
            if plain.dynamic or plain.scale != 1.0:  # else looks are counted, of any backwards
                self.same(int(scaler.unskipped), plain.unskipped, f"clean backwards of loss {i}")
        for o in range(len(self.optimizers)) if look else ():
            with torch.no_grad():
                self._check_gradients(o)
                self._check_state(o)

    def _check_weights(self) -> None:
        params, refs = self.params, self.ref.params
        for o in range(len(self.optimizers)):
            rtol, atol = (1e-5, 2e-6) if o in self.rounded else (0.0, 0.0)
            for name, entry in zip(self.ref.names(o), self.entries(o), strict=True):
                plain = self.ref.entry(name)
                if name in self.ref.added:
                    continue  # whose master is made when it is looked at next
                weight, expected = entry, plain
                if entry is not params[name] and name not in self.ref.written:
                    low = params[name]  # whether a master has taken what moved no version depends on who stepped
                    entry = torch.where(low != weight.to(low.dtype), low.float(), weight)
                    expected = self.ref.exact(name)
                self.same(entry, expected, f"what optimizer {o} steps of {name}", rtol, atol)
                is_near = o in self.rounded and not torch.equal(entry, expected)
                if is_near and weight is not params[name] and torch.equal(refs[name], expected.to(refs[name].dtype)):
                    refs[name].copy_(entry)
                if is_near or expected is not plain:
                    plain.copy_(weight)
            self.rounded.discard(o)
        for name, param in params.items():
            self.same(param, refs[name], name)
        for m, (ours, plain_model) in enumerate(zip(self.models, self.ref.models, strict=True)):
            for (name, buffer), plain in zip(ours.named_buffers(), plain_model.buffers(), strict=True):
                self.same(buffer, plain, f"m{m}.{name}")

    def _check_gradients(self, o: int) -> None:
        ref = self.ref
        if not self.is_open(o):
            weights_of(self.optimizers[o])  # makes gradients beside masters FP32
            ref.scan(o)
            ref.write_back(o, ref.written - ref.moved)
            ref.refresh(o)
            ref.widen(o)
            ref.deferred.discard(o)
        self.match_gradients(o, 2e-6 if o in ref.clipped else 0.0)

    @torch.no_grad()
    def match_gradients(self, o: int, rtol: float) -> None:
        """Compare; where they are right but for rounding, the reference goes on with ours."""
        for name in self.ref.names(o):
            ours, plain = self.params[name].grad, self.ref.params[name].grad
            # Ours is rounded to half once; torch's clip rounds norm, factor and product, half an eps each.
            half = torch.finfo(ours.dtype) if rtol and ours is not None and ours.dtype != torch.float32 else None
            # What was clipped may since have been added to a gradient that nearly cancels it.
            largest = float(plain.nan_to_num(0.0, 0.0, 0.0).abs().max()) if rtol and plain is not None else 0.0
            near = (2 * half.eps, half.smallest_normal * half.eps) if half else (rtol, rtol * largest)
            self.same(ours, plain, f"gradient of {name}", *near)
            if rtol and ours is not None:
                plain.data.copy_(ours)

    def _check_state(self, o: int) -> None:
        is_near = o in self.inexact or o in self.ref.clipped
        ours, plain = (side.state_dict()["state"] for side in (self.optimizers[o], self.ref.optimizers[o]))
        by_formula = self.kinds[o] in ("fused lamb", "fused novograd", "fused adagrad")
        for index, name in enumerate(self.ref.names(o)):
            mine, theirs = ({k: v for k, v in state.get(index, {}).items() if v is not None} for state in (ours, plain))
            if set(mine) != set(theirs) and not (by_formula and set(theirs) <= set(mine)):
                raise MismatchError(f"state of {name}: {sorted(mine)}, expected {sorted(theirs)}")
            for key, value in theirs.items():
                if isinstance(value, Tensor) and isinstance(mine[key], Tensor):
                    # A gradient may nearly cancel a moment that has signs.
                    largest = float(value.nan_to_num(0.0, 0.0, 0.0).abs().max()) if bool((value < 0).any()) else 0.0
                    rtol, atol = (2e-5, 1e-9 + 5e-7 * largest) if is_near else (0.0, 0.0)
                    if o in self.ref.clipped and value.dtype in (torch.float16, torch.bfloat16):
                        # At O3 state is made of gradients in half, which clip as in _check_gradients.
                        half = torch.finfo(value.dtype)
                        rtol, atol = 2 * half.eps, half.smallest_normal * half.eps
                    self.same(mine[key].float(), value.float(), f"state {key!r} of {name}", rtol, atol)
                else:
                    self.same(mine[key], value, f"state {key!r} of {name}")

    def is_finite(self) -> bool:
        """True if there is something left to compare."""
        return all(bool(p.isfinite().all()) for side in (self.params, self.ref.params) for p in side.values())

    def close(self) -> None:
        """Take it back, on both sides: plain models hold exact weights afterwards."""
        lifecycle.close(self.ref)
        amp.close()
        for name, p in self.params.items():
            self.same(p, self.ref.params[name].to(self.half or torch.float32), f"{name} after close()")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings of torch and ours are not what is looked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    amp.close()


def _short(value: Any) -> str:
    return " ".join(str(value.tolist() if isinstance(value, Tensor) else value).split())[:160]
