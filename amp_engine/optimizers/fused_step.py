"""One optimizer's step by the kernels: its tensors as a table, its state kept in torch's form."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import kernels
from amp_engine.devices import moved
from amp_engine.kernels import walk
from amp_engine.optimizers.rules import TORCH_RULES, Rule

NORM = "exp_avg_sq"  # where NovoGrad keeps the one norm of a tensor

_FUSED_STEPS: weakref.WeakKeyDictionary[Optimizer, FusedStep] = weakref.WeakKeyDictionary()


def fused_step_of(optimizer: Optimizer) -> FusedStep | None:
    """What steps `optimizer` with the kernels, or None if its class is not known to them.

    torch.optim's Adam, AdamW and SGD are (the classes themselves, not subclasses) where the native kernels are, and
    this package's own optimizers always.
    """
    fused = _FUSED_STEPS.get(optimizer)
    if fused is None:
        rule = getattr(type(optimizer), "rule", None) or TORCH_RULES.get(type(optimizer))
        if not isinstance(rule, Rule):
            return None
        fused = _FUSED_STEPS[optimizer] = FusedStep(optimizer, rule)
    return fused


def release_fused_step(optimizer: Optimizer) -> None:
    """Give a class of torch.optim its state in its own form, and forget it. Waits for the device."""
    fused = _FUSED_STEPS.get(optimizer)
    if fused is not None and type(optimizer) in TORCH_RULES:
        del _FUSED_STEPS[optimizer]
        fused.release()


class FusedStep:
    """Steps every tensor of one optimizer in one pass.

    Args:
        optimizer: held weakly. Its `state` is filled as its own class would fill it; only `step` counts differ: they
            are views of one float32 tensor on the parameters' device, where they advance.
        rule: what its class computes.
    """

    def __init__(self, optimizer: Optimizer, rule: Rule) -> None:
        self.rule = rule
        self._optimizer = weakref.ref(optimizer)
        self._tables: list[_Table] = []
        self._captured: list[_Table] = []  # those of before, which a CUDA graph goes on writing to
        self._weights: tuple[Tensor, ...] = ()
        self._copies: tuple[Tensor | None, ...] = ()
        self._inner: list[dict[str, Any]] = []
        self._stateless: list[int] = []  # rows that have had no gradient yet
        self._needs_state1: list[bool] = []
        self._is_ours = rule not in TORCH_RULES.values()
        self._hook = optimizer.register_state_dict_post_hook(_to_torch_form)

    def takes(self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None], known: bool = False) -> bool:
        """Whether the kernels compute what the optimizer asks for, of these tensors. No host sync.

        Args:
            weights: n, what would be stepped.
            gradients: n; or None.
            known: whether all gradients are known to be dense, of the kernels' types, and laid out as their weights.
        """
        optimizer = self._live_optimizer()
        if not self._is_ours and not kernels.has_native(weights[0].device if weights else torch.device("cpu")):
            return False
        if not all(self.rule.supports(group) for group in optimizer.param_groups):
            return False
        dtypes = kernels.FLOATS if self._is_ours else (torch.float32,)
        if not walk.same_objects(weights, self._weights) and not all(
            w.dtype in dtypes and kernels.is_dense(w) and not kernels.is_lazy(w) for w in weights
        ):
            return False
        return known or all(g is None or _is_plain(g) for g in gradients)

    def step(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        copies: Sequence[Tensor | None] | None = None,
        scaled: Sequence[bool] | None = None,
        *,
        weights: Sequence[Tensor] | None = None,
        inv_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        norm: Tensor | None = None,
        max_norm: float = math.inf,
        checks: kernels.Checks | None = None,
    ) -> None:
        """One step of every weight that has a gradient; of none where `found_inf != 0`. No host sync.

        Args:
            params: n, the entries of the optimizer's groups in order.
            gradients: n; float16, bfloat16 or float32, of the weights' shapes, or None.
            copies: n low-precision parameters that the new weights are rounded into, or None.
            weights: n, what is stepped; `params` themselves unless the optimizer keeps masters of its own.
            scaled: n; which gradients are multiplied by `inv_scale * min(1, max_norm / (norm + 1e-6))`.
            inv_scale, found_inf, norm: float32, shape [].
            max_norm: infinity: not clipped.
            checks: what `kernels.check` found for exactly these gradients.
        """
        optimizer = self._live_optimizer()
        weights = params if weights is None else weights
        copies = [None] * len(weights) if copies is None else copies
        scaled = [False] * len(weights) if scaled is None else scaled
        if isinstance(gradients, list):  # and not a native list of what is known to be laid out so
            gradients = [g if s else laid_out_as(w, g) for w, g, s in zip(weights, gradients, scaled, strict=True)]
        if not self._is_current(weights, copies, gradients):
            self._build(params, weights, copies, gradients)
        groups = [self.rule.hyperparameters(group) for group in optimizer.param_groups]
        for table in self._tables:
            device, rows = table.device, table.rows
            table.is_captured |= device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            table.native.step(
                gradients if rows is None else [gradients[i] for i in rows],
                scaled if rows is None else [scaled[i] for i in rows],
                groups,
                inv_scale=_on(inv_scale, device),
                found_inf=_on(found_inf, device),
                norm=_on(norm, device),
                max_norm=max_norm,
                checks=checks if rows is None else None,
            )

    def release(self) -> None:
        """Give the state its torch form back: counts are tensors of their own, on the CPU. Waits for the device."""
        for table in self._tables:
            for inner, count in zip(table.inner, table.steps.cpu().unbind(), strict=True):
                if self.rule.keeps_step and "step" in inner:
                    inner["step"] = count.clone()
                elif not self.rule.keeps_step and self.rule.state1 in inner and count == 0:
                    inner[self.rule.state1] = None
        self._tables = []
        self._hook.remove()

    def in_torch_form(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """`state_dict` with the counts as torch's classes keep them, on the CPU. Waits for the device.

        A momentum buffer whose first step was skipped on the device does not exist yet, as far as torch knows.
        """
        counts = {id(view): count for table in self._tables for view, count in table.by_state()}
        if not counts:
            return state_dict
        key = "step" if self.rule.keeps_step else self.rule.state1
        state = dict(state_dict["state"])
        for name, inner in state.items():
            count = counts.get(id(inner.get(key)))
            if count is not None and self.rule.keeps_step:
                state[name] = {**inner, key: torch.tensor(count, device="cpu")}
            elif count == 0:
                state[name] = {**inner, key: None}
        return {**state_dict, "state": state}

    def _is_current(
        self, weights: Sequence[Tensor], copies: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> bool:
        return (
            walk.same_objects(weights, self._weights)
            and walk.same_objects(copies, self._copies)
            and walk.same_objects(list(self._live_optimizer().state.values()), self._inner)
            and all(table.is_current(self.rule) for table in self._tables)
            and all(gradients[i] is None for i in self._stateless)
            and [self.rule.needs_state1(group) for group in self._live_optimizer().param_groups] == self._needs_state1
        )

    def _build(
        self,
        params: Sequence[Tensor],
        weights: Sequence[Tensor],
        copies: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
    ) -> None:
        optimizer = self._live_optimizer()
        group_of = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        known = {id(view): count for table in self._tables for view, count in table.by_state()}
        start = [self._start(optimizer.state.get(p) or {}, known) for p in params]
        self._needs_state1 = [self.rule.needs_state1(group) for group in optimizer.param_groups]
        for p, w, g, i in zip(params, weights, gradients, group_of, strict=True):
            if g is not None and self._lacks_state(optimizer.state.get(p) or {}, self._needs_state1[i]):
                self._fill_state(optimizer.state[p], w, optimizer.param_groups[i])
        self._stateless = [
            row
            for row, (p, i) in enumerate(zip(params, group_of, strict=True))
            if self._lacks_state(optimizer.state.get(p) or {}, self._needs_state1[i])
        ]
        by_device: dict[torch.device, list[int]] = {}
        for i, w in enumerate(weights):
            by_device.setdefault(w.device, []).append(i)
        self._captured += [table for table in self._tables if table.is_captured]
        self._tables = [
            _Table(
                self.rule,
                rows=None if len(by_device) == 1 else rows,
                device=device,
                weights=[weights[i] for i in rows],
                copies=[copies[i] for i in rows],
                groups=[group_of[i] for i in rows],
                inner=[optimizer.state.get(params[i]) or {} for i in rows],
                start=[start[i] for i in rows],
            )
            for device, rows in by_device.items()
        ]
        self._weights, self._copies = tuple(weights), tuple(copies)
        self._inner = list(optimizer.state.values())

    def _start(self, state: dict[str, Any], known: dict[int, float]) -> float:
        """How many steps this tensor has had; for SGD, which does not count them, 0 or more."""
        if self.rule.keeps_step:
            step = state.get("step", 0.0)
            return known[id(step)] if id(step) in known else float(step)
        buffer = state.get(self.rule.state1)
        return 0.0 if buffer is None else known.get(id(buffer), 1.0)

    def _fill_state(self, state: dict[str, Any], weight: Tensor, group: dict[str, Any]) -> None:
        """As torch's classes do at a tensor's first gradient."""
        rule = self.rule
        if rule.keeps_step:
            state.setdefault("step", torch.tensor(0.0, device="cpu"))
        names = [rule.state1] if rule.needs_state1(group) else []
        for name in names + ([] if rule.state2 is None else [rule.state2]):
            if state.get(name) is None:
                state[name] = torch.zeros_like(weight, dtype=torch.float32, memory_format=torch.preserve_format)
        if rule.keeps_norm:
            state.setdefault(NORM, torch.zeros((), device="cpu"))

    def _lacks_state(self, state: dict[str, Any], needs_state1: bool) -> bool:
        rule = self.rule
        return (
            (needs_state1 and state.get(rule.state1) is None)
            or (rule.state2 is not None and state.get(rule.state2) is None)
            or (rule.keeps_step and "step" not in state)
        )

    def _live_optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "called with the optimizer in hand"
        return optimizer


class _Table:
    """The tensors of one device. `rows` are their places among the optimizer's, None if they are all."""

    def __init__(
        self,
        rule: Rule,
        *,
        rows: list[int] | None,
        device: torch.device,
        weights: list[Tensor],
        copies: list[Tensor | None],
        groups: list[int],
        inner: list[dict[str, Any]],
        start: list[float],
    ) -> None:
        self.rows = rows
        self.device = device
        self.is_captured = False  # in a CUDA graph
        self.inner = inner
        self.steps = torch.tensor(start, dtype=torch.float32, device=device)
        self.state1: list[Tensor | None] = [state.get(rule.state1) for state in inner]
        self.state2: list[Tensor | None] = [state.get(rule.state2) if rule.state2 else None for state in inner]
        self._counts: list[Tensor | None] = self.state1
        if rule.keeps_step:
            self._counts = [*self.steps.unbind()]
            for state, count in zip(inner, self._counts, strict=True):
                if "step" in state:
                    state["step"] = count
        norms = None
        self._norms: list[Tensor | None] = [None] * len(inner)
        if rule.keeps_norm:
            norms = torch.tensor([float(state.get(NORM, 0.0)) for state in inner], dtype=torch.float32, device=device)
            self._norms = [*norms.unbind()]
            for state, norm in zip(inner, self._norms, strict=True):
                if NORM in state:
                    state[NORM] = norm
        self.native = kernels.StepTable(rule.kind, weights, copies, self.state1, self.state2, groups, self.steps, norms)

    def is_current(self, rule: Rule) -> bool:
        """Whether the optimizer's state is still what the table points to."""
        return (
            walk.same_entries(self.inner, rule.state1, self.state1)
            and (rule.state2 is None or walk.same_entries(self.inner, rule.state2, self.state2))
            and (not rule.keeps_step or walk.same_entries(self.inner, "step", self._counts))
            and (not rule.keeps_norm or walk.same_entries(self.inner, NORM, self._norms))
            and self.native.is_current()
        )

    def by_state(self) -> list[tuple[Tensor, float]]:
        """The tensor of the optimizer's state that tells a count, and the count. Waits for the device."""
        pairs = zip(self._counts, self.steps.tolist(), strict=True)
        return [(tensor, count) for tensor, count in pairs if tensor is not None]


def _to_torch_form(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    fused = _FUSED_STEPS.get(optimizer)
    return None if fused is None else fused.in_torch_form(state_dict)


def _is_plain(grad: Tensor) -> bool:
    return type(grad) in (Tensor, nn.Parameter) and grad.layout is torch.strided and grad.dtype in kernels.FLOATS


def laid_out_as(weight: Tensor, grad: Tensor | None) -> Tensor | None:
    """`grad` in the memory order of `weight`, which the kernels walk. Autograd gives it so; users may not.

    What lies negated in memory, or nowhere, is written out.
    """
    if grad is None or grad.shape != weight.shape or (kernels.same_layout(grad, weight) and not kernels.is_lazy(grad)):
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else moved(tensor, device)
