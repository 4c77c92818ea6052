"""Steps one optimizer by the kernels: its tensors become a table, its state keeps torch's form."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import kernels
from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.ground import devices
from amp_engine.ground.devices import moved
from amp_engine.ground.distributed import is_sharded
from amp_engine.kernels import tensor_lists
from amp_engine.kernels.refusals import check_apart
from amp_engine.optimizers.rules import TORCH_RULES, Rule, own_rule_of, rule_of, unsupported
from amp_engine.optimizers.state_form import StateForm
from amp_engine.optimizers.step_table import Table

_FUSED_STEPS: weakref.WeakKeyDictionary[Optimizer, FusedStep] = weakref.WeakKeyDictionary()


def fused_step_of(optimizer: Optimizer) -> FusedStep | None:
    """Return the FusedStep of `optimizer`, made at the first call, or None if the kernels do not know its step.

    They know torch.optim's Adam, AdamW and SGD themselves, and this package's optimizers, but for subclasses with
    another `step`.
    """
    fused = _FUSED_STEPS.get(optimizer)
    if fused is None:
        rule = rule_of(optimizer)
        return None if rule is None else _made(optimizer, rule)
    return fused if fused.is_whole else None


def own_fused_step(optimizer: Optimizer) -> FusedStep:
    """Return the FusedStep with which the `step` of this package's own classes steps, made at the first call."""
    rule = own_rule_of(optimizer)
    assert rule is not None
    return _FUSED_STEPS.get(optimizer) or _made(optimizer, rule)


def _made(optimizer: Optimizer, rule: Rule) -> FusedStep:
    fused = _FUSED_STEPS[optimizer] = FusedStep(optimizer, rule)
    return fused


def fused_step_so_far(optimizer: Optimizer) -> FusedStep | None:
    """Return the FusedStep of `optimizer` if a step or `initialize` has made it, else None. Changes nothing."""
    return _FUSED_STEPS.get(optimizer)


def release_fused_step(optimizer: Optimizer) -> None:
    """Widen the moments of `optimizer` to float32.

    If it is torch.optim's, restores torch's form of its state, discards its FusedStep, and waits for the device.
    """
    fused = _FUSED_STEPS.get(optimizer)
    if fused is not None:
        fused.widen_moments()
        if type(optimizer) in TORCH_RULES:
            fused.release()
            del _FUSED_STEPS[optimizer]
        else:
            fused.keep_apart([])


class Apart(NamedTuple):
    """One entry of the groups that is stepped apart from the others, as of its last step."""

    param: Tensor
    weight: Tensor
    copy: Tensor | None
    table: Table


@dataclass(slots=True)
class StepInput:
    """The tensors that one step reads and writes, one row for each entry of the optimizer's groups, in order.

    Attributes:
        params: n, the entries.
        weights: n, the tensors to step: `params`, except for shards and masters.
        gradients: n; of the weights' shapes, or None.
        copies: n low-precision parameters that the new weights are rounded into, or None each; None: there are none.
            Where other code wrote one of them, it replaces the weight.
        scaled: n; 1 for gradients that are multiplied by `inv_scale * min(1, max_norm / (norm + 1e-6))`.
        are_plain: True if all gradients are known to be dense, of the kernels' types, and laid out as their weights.
        is_current: True if this step can use the tables of the last one; `FusedStep.plan` sets it.
    """

    params: Sequence[Tensor]
    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    copies: Sequence[Tensor | None] | None
    scaled: bytes
    are_plain: bool = False
    is_current: bool = False


class FusedStep:
    """Steps every tensor of one optimizer in one pass.

    Args:
        optimizer: referred to weakly. Its `state` is filled like by its own class, except for `step` counts: they are
            views of one float32 tensor on the parameters' device, where the kernels advance them.
    """

    def __init__(self, optimizer: Optimizer, rule: Rule) -> None:
        self.rule = rule
        self.is_whole = rule_of(optimizer) is not None  # False inside of a subclass with a step of its own
        self._optimizer = weakref.ref(optimizer)
        self._tables: list[Table] = []
        self._apart: dict[int, Apart] = {}  # by id of the parameter
        self._captured: list[Table] = []  # earlier tables, to which CUDA graphs still write
        self._weights: tuple[Tensor, ...] = ()
        self._copies: tuple[Tensor | None, ...] = ()  # written beside the weights by the last step
        self._inner: list[dict[str, Any]] = []
        self._stateless: list[int] = []  # rows that have had no gradient yet
        self._needs_state1: list[bool] = []
        self._group_sizes: list[int] = []
        self._form = StateForm(rule)
        self.has_stepped = False  # True once the kernels have stepped
        self._hook = optimizer.register_state_dict_post_hook(_to_torch_form)

    @property
    def moment_dtype(self) -> torch.dtype:
        """The type in which moments are kept: float32, bfloat16, or uint8 in blocks."""
        return self._form.dtype

    def keep_moments_in(self, dtype: torch.dtype, counts: bool) -> None:
        """Keep moments in `dtype` from the next step on; `counts`: and a count of steps, also of SGD."""
        self._form.dtype, self._form.counts = dtype, counts and not self.rule.keeps_step

    def plan(self, step: StepInput) -> StepInput | None:
        """Return `step`, with `is_current` set, if the kernels can do it, else None. No host sync."""
        optimizer = self._live_optimizer()
        if not all(map(self.rule.supports, optimizer.param_groups)):
            return None
        if not step.are_plain and not all(g is None or _is_plain(g) for g in step.gradients):
            return None
        is_current = self._is_current(optimizer, step.weights, step.gradients)
        step.is_current = is_current and (step.copies is None or tensor_lists.same_objects(step.copies, self._copies))
        return step if step.is_current or self.obstacle(step) is None else None

    def step(
        self,
        step: StepInput,
        *,
        inv_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        norm: Tensor | None = None,
        max_norm: float = math.inf,
        checks: kernels.Checks | None = None,
    ) -> None:
        """Step every weight that has a gradient; none if `found_inf != 0`. No host sync.

        Raises AmpStateError during the capture of a CUDA graph if the tensors are not those of the last step.

        Args:
            step: as `plan` returned it; nothing may have been written since.
            inv_scale, found_inf, norm: float32, shape [].
            max_norm: the norm that gradients are clipped to; infinity does not clip.
            checks: the result of `kernels.check` for exactly these gradients.
        """
        optimizer = self._live_optimizer()
        weights, gradients, scaled = step.weights, step.gradients, step.scaled
        if not (step.are_plain and step.is_current):
            gradients = [laid_out_as(w, g) for w, g in zip(weights, gradients, strict=True)]
        if not step.is_current:
            if len(weights) > 0 and devices.is_capturing(weights[0].device):
                raise AmpStateError(
                    f"{type(optimizer).__name__}.step() is captured in a CUDA graph, but the tensors are not those of "
                    "the last step, and what is made once for them cannot be made inside of a capture.  Run at least "
                    "one iteration (scale_loss, backward, step, zero_grad) outside of it first."
                )
            copies = step.copies or [None] * len(weights)
            self._build(step.params, weights, copies, gradients, adopts=step.copies is not None)
        groups = [self.rule.hyperparameters(group) for group in optimizer.param_groups]
        for table in self._tables:
            device, rows = table.device, table.rows
            table.is_captured |= devices.is_capturing(device)
            scale, flag, total = [t if t is None else moved(t, device) for t in (inv_scale, found_inf, norm)]
            table.native.step(
                gradients if rows is None else [gradients[i] for i in rows],
                scaled if rows is None else bytes(scaled[i] for i in rows),
                groups,
                # Positional, as pybind looks each name up.
                scale,
                flag,
                total,
                max_norm,
                checks if rows is None else None,
            )

    def step_apart(
        self,
        param: Tensor,
        weight: Tensor,
        grad: Tensor,
        copy: Tensor | None,
        group: dict[str, Any],
        found_inf: Tensor | None,
    ) -> None:
        """Step one weight; not if `found_inf != 0`. No host sync.

        An optimizer is stepped by this or by `step`, not by both.

        Args:
            param, weight, grad, copy: a row of a `StepInput`; `check_apart` passed the gradient.
            group: of the parameter.
            found_inf: float32, shape [].
        """
        state_of, known = self._live_optimizer().state, self._apart.get(id(param))
        lacks = self._form.lacks(state_of.get(param) or {}, self.rule.needs_state1(group))
        state = state_of[param] if lacks else state_of.get(param)
        if not (
            known is not None
            and known.param is param
            and known.weight is weight
            and known.copy is copy
            and (state is None or known.table.inner[0] is state)
            and known.table.is_current()
            and not lacks
        ):
            state = {} if state is None else state
            counts = {} if known is None else {id(view): count for view, count in known.table.by_state()}
            start = self._form.start(state, counts)
            self._form.fill(state, weight, group)
            self._form.lay_out(state, weight)
            table = Table(
                self.rule,
                rows=None,
                device=weight.device,
                weights=[weight],
                copies=[copy],
                groups=[0],
                inner=[state],
                start=[start],
                adopts=copy is not None,
                keeps_step=self._form.keeps_step,
            )
            known = self._apart[id(param)] = Apart(param, weight, copy, table)
            self.has_stepped = True
        known.table.native.step([laid_out_as(weight, grad)], b"\0", [self.rule.hyperparameters(group)], None, found_inf)

    def check_groups(self, option: str) -> None:
        """Raise AmpStateError for a setting of a group that `step_apart`, for this option, would not follow."""
        optimizer = self._live_optimizer()
        if (asked := unsupported(self.rule, optimizer.param_groups)) is not None:
            raise AmpStateError(
                f"A group of {type(optimizer).__name__} has {asked}, which the kernels do not compute, and with "
                f"{option} they alone step.  Nothing was stepped.  Take that back, or leave {option} out."
            )

    @staticmethod
    def check_apart(grad: Tensor) -> None:
        """Raise AmpStateError for a gradient that `step_apart` does not take."""
        if not _is_plain(grad):
            layout = "" if grad.layout is torch.strided else f" of layout {grad.layout}"
            raise AmpStateError(
                f"A parameter of shape {tuple(grad.shape)} has a {type(grad).__name__} of {grad.dtype}{layout} for a "
                "gradient, but release_gradients and masters_on take dense ones of float32, float16 and bfloat16 only. "
                " Leave them out."
            )

    def keep_apart(self, params: Iterable[Tensor]) -> None:
        """Forget the steps of parameters that are not among `params`."""
        ids = set(map(id, params))
        self._apart = {key: one for key, one in self._apart.items() if key in ids}

    def widen_moments(self) -> None:
        """Keep moments in float32, and no count that the class does not keep, from now on."""
        for p, state in self._live_optimizer().state.items() if self._form.dtype is not torch.float32 else ():
            held = [(name, state[name]) for name in self._form.moments if state.get(name) is not None]
            state.update((name, self._form.wide(name, value, p).float()) for name, value in held)
        for state in self._live_optimizer().state.values() if self._form.counts else ():
            state.pop("step", None)
        self._form.dtype, self._form.counts = torch.float32, False

    def loaded(self, name: str, codes: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a moment of `param` that was saved in blocks, widened to `dtype` if this run keeps no blocks.

        Other state in uint8 is returned as it is.
        """
        is_kept = self._form.dtype is codes.dtype or not self._form.is_in_blocks(name, codes, param)
        return codes if is_kept else self._form.wide(name, codes, param).to(dtype)

    def forget(self) -> None:
        """Let go of the state of the last step, which other state has replaced."""
        self._captured += [table for table in self._tables if table.is_captured]
        self._tables, self._weights, self._inner = [], (), []
        self._apart.clear()

    def release(self) -> None:
        """Restore torch's form of the state: each count is its own tensor, on the CPU. Waits for the device."""
        for table in self._every_table():
            for inner, count in zip(table.inner, table.steps.cpu().unbind(), strict=True):
                if self.rule.keeps_step and "step" in inner:
                    inner["step"] = count.clone()
                elif not self.rule.keeps_step and self.rule.state1 in inner and count == 0:
                    inner[self.rule.state1] = None
        self._tables = []
        self._apart.clear()
        self._hook.remove()

    def in_torch_form(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return `state_dict` with the counts as torch's classes keep them, on the CPU. Waits for the device.

        A momentum buffer whose first step was skipped on the device becomes None, as torch has none before a step.
        """
        counts = {id(view): count for table in self._every_table() for view, count in table.by_state()}
        if not counts:
            return state_dict
        key = "step" if self._form.keeps_step else self.rule.state1
        state = dict(state_dict["state"])
        for name, inner in state.items():
            count = counts.get(id(inner.get(key)))
            if count is not None and self._form.keeps_step:
                state[name] = inner = {**inner, key: torch.tensor(count, dtype=torch.float32, device="cpu")}
            if count == 0 and not self.rule.keeps_step:
                state[name] = {**inner, self.rule.state1: None}
        return {**state_dict, "state": state}

    def obstacle(self, step: StepInput) -> str | None:
        """Explain why the kernels cannot step these tensors with these settings and this state; None if they can."""
        optimizer = self._live_optimizer()
        if (asked := unsupported(self.rule, optimizer.param_groups)) is not None:
            return f"a group has {asked}, which the kernels do not compute"
        for device in dict.fromkeys(w.device for w in step.weights):
            if (reason := kernels.missing(device)) is not None:
                return f"they are not compiled: {reason}"
        dtypes = self._dtypes
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        copies = step.copies or [None] * len(step.weights)
        rows = zip(step.params, step.weights, step.gradients, copies, groups, strict=True)
        for i, (p, w, g, c, group) in enumerate(rows):
            if is_sharded(w):
                return f"parameter {i} is a {type(w).__name__}, which wraps other tensors"
            if self._is_idle(w, c, g):
                continue
            is_split = c is not None and c.dtype in kernels.REMAINDERS
            if (w.dtype not in dtypes and not is_split) or not kernels.is_dense(w) or kernels.is_lazy(w):
                known = " or ".join(map(str, dtypes))
                return f"parameter {i}, {w.dtype} of shape {tuple(w.shape)}, is not {known}, or has gaps in memory"
            if g is not None and not (step.are_plain or _is_plain(g)):
                layout = "" if g.layout is torch.strided else f" of layout {g.layout}"
                return f"the gradient of parameter {i} is a {type(g).__name__} of {g.dtype}{layout}"
            if g is not None and (g.shape != w.shape or g.device != w.device):
                return (
                    f"parameter {i} of shape {tuple(w.shape)} on {w.device} has a gradient of another shape or device"
                )
            if c is not None and not (
                (is_split or c.dtype in kernels.FLOATS) and kernels.is_dense(c) and kernels.same_layout(c, w)
            ):
                return f"the copy of parameter {i} is of another type or another order in memory"
            state = optimizer.state.get(p) or {}
            reason = self._form.misfit(state, w) or (self._form.torn(state, group) if g is not None else None)
            if reason is not None:
                return f"parameter {i} of shape {tuple(w.shape)} {reason}"
        if self._form.is_ours:
            return None  # the table refuses overlaps with its own message
        both = list(zip(self._states(step.params), step.weights, strict=True))
        moments = {  # a moment whose layout must change gets its own memory
            name: [self._form.kept(state.get(name), w) for state, w in both] for name in self._form.moments
        }
        try:
            check_apart("step", {"weights": step.weights, "copies": copies, **moments}, {})
        except AmpValueError as e:
            return str(e)
        return None

    @property
    def _dtypes(self) -> tuple[torch.dtype, ...]:
        """The types of weights that the kernels step, but for split ones."""
        return kernels.FLOATS if self._form.is_ours else (torch.float32,)

    def _is_idle(self, weight: Tensor, copy: Tensor | None, gradient: Tensor | None) -> bool:
        """True if the kernels could not step a weight, and need not: it has no gradient, as frozen half weights."""
        return gradient is None and copy is None and weight.dtype not in self._dtypes

    def _states(self, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        state = self._live_optimizer().state
        return [state.get(p) or {} for p in params]

    def _is_current(self, optimizer: Optimizer, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> bool:
        if not (
            tensor_lists.same_objects(weights, self._weights)
            and tensor_lists.same_objects(list(optimizer.state.values()), self._inner)
            and list(map(self.rule.needs_state1, optimizer.param_groups)) == self._needs_state1
            and [len(group["params"]) for group in optimizer.param_groups] == self._group_sizes
        ):
            return False
        for table in self._tables:  # no generators, as this runs before each step
            if not table.is_current():
                return False
        return not self._stateless or all(gradients[i] is None for i in self._stateless)

    def _build(
        self,
        params: Sequence[Tensor],
        weights: Sequence[Tensor],
        copies: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        adopts: bool,
    ) -> None:
        optimizer = self._live_optimizer()
        group_of = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        known = {id(view): count for table in self._tables for view, count in table.by_state()}
        start = [self._form.start(state, known) for state in self._states(params)]
        self._needs_state1 = [self.rule.needs_state1(group) for group in optimizer.param_groups]
        self._group_sizes = [len(group["params"]) for group in optimizer.param_groups]
        idle = {i for i, row in enumerate(zip(weights, copies, gradients, strict=True)) if self._is_idle(*row)}
        for i, (p, w, g) in enumerate(zip(params, weights, gradients, strict=True)):
            if g is not None and self._form.lacks(optimizer.state.get(p) or {}, self._needs_state1[group_of[i]]):
                self._form.fill(optimizer.state[p], p if is_sharded(p) else w, optimizer.param_groups[group_of[i]])
            if p in optimizer.state and i not in idle:
                self._form.lay_out(optimizer.state[p], w)
        self._stateless = [
            row
            for row, (p, i) in enumerate(zip(params, group_of, strict=True))
            if row in idle or self._form.lacks(optimizer.state.get(p) or {}, self._needs_state1[i])
        ]
        by_device: dict[torch.device, list[int]] = {}
        for i, w in enumerate(weights):
            by_device.setdefault(w.device, []).append(i)
        self._captured += [table for table in self._tables if table.is_captured]
        self._tables = [
            Table(
                self.rule,
                rows=None if len(by_device) == 1 else rows,
                device=device,
                weights=[None if i in idle else weights[i] for i in rows],
                copies=[copies[i] for i in rows],
                groups=[group_of[i] for i in rows],
                inner=[{} if i in idle else optimizer.state.get(params[i], {}) for i in rows],
                start=[start[i] for i in rows],
                adopts=adopts,
                keeps_step=self._form.keeps_step,
            )
            for device, rows in by_device.items()
        ]
        self._weights, self._copies, self.has_stepped = tuple(weights), tuple(copies), True
        self._inner = list(optimizer.state.values())

    def _every_table(self) -> list[Table]:
        return [*self._tables, *(one.table for one in self._apart.values())]

    def _live_optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "called with the optimizer in hand"
        return optimizer


def _to_torch_form(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    fused = _FUSED_STEPS.get(optimizer)
    return None if fused is None else fused.in_torch_form(state_dict)


def _is_plain(grad: Tensor) -> bool:
    return type(grad) in (Tensor, nn.Parameter) and grad.layout is torch.strided and grad.dtype in kernels.FLOATS


def laid_out_as(weight: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return `grad` in the memory order of `weight`, which the kernels need, or a copy of it in that order.

    Autograd's gradients have that order, a user's may not. Lazy gradients (negated, or without memory) are copied.
    """
    if grad is None or grad.shape != weight.shape or (kernels.same_layout(grad, weight) and not kernels.is_lazy(grad)):
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
