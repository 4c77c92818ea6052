"""The steps in plain PyTorch, on any device, as the reference of the kernels. None of them waits for the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from amp_engine.errors import AmpTypeError, AmpValueError
from amp_engine.ground.dtypes import followed
from amp_engine.kernels import halves
from amp_engine.kernels.backend import Checks, TensorList
from amp_engine.kernels.formulas import FORMULAS, Formula, Row, State, one_or, times
from amp_engine.kernels.layout import FLOATS, address_of
from amp_engine.kernels.ops import checks_of, clip_factor
from amp_engine.kernels.refusals import check_apart, check_lists, check_scalars, check_vector


class StepTable:
    """The tensors of one optimizer, stepped together; see `kernels.step_table`."""

    def __init__(
        self,
        formula: str,
        weights: Sequence[Tensor],
        copies: TensorList,
        state1: TensorList,
        state2: TensorList,
        groups: Sequence[int],
        steps: Tensor,
        norms: Tensor | None,
        adopts: bool = False,
    ) -> None:
        if formula not in FORMULAS:
            raise AmpValueError(f"StepTable: formula is {formula!r}, but must be one of {', '.join(FORMULAS)}.")
        lists = {"weights": weights, "copies": copies, "state1": state1, "state2": state2}
        device, n = steps.device, len(weights)
        states = (torch.float32, torch.bfloat16) if formula == "adam" else (torch.float32,)
        allowed = {"state1": states, "state2": states, "copies": (*FLOATS, halves.REMAINDER)}
        check_lists("StepTable", lists, allowed=allowed, device=device)
        _check_halves(weights, copies, state1, state2)
        if len(groups) != n:
            raise AmpValueError(f"StepTable: groups has {len(groups)} entries, but weights has {n}.")
        check_vector("StepTable", "steps", steps, n, device)
        check_vector("StepTable", "norms", norms, n, device)
        if FORMULAS[formula].keeps_norm and norms is None:
            raise AmpValueError(f"StepTable: novograd keeps norms; pass a float32 tensor of shape [{n}].")
        self._name, self._formula = formula, FORMULAS[formula]
        self._weights, self._copies = list(weights), list(copies)
        self._state1, self._state2 = list(state1), list(state2)
        self._groups = list(groups)
        self._steps, self._norms, self._adopts = steps, norms, adopts
        written: dict[str, TensorList] = {**lists, "steps": [steps], "norms": [norms]}
        check_apart("StepTable", written, {})
        self._written = written
        self._was_stepped = False
        self._built_on = self._memory()

    def is_current(self) -> bool:
        """See `kernels.StepTable.is_current`."""
        return self._memory() == self._built_on

    @torch.no_grad()
    def step(
        self,
        grads: TensorList,
        scaled: Sequence[int],
        groups: Sequence[Formula],
        inv_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        norm: Tensor | None = None,
        max_norm: float = math.inf,
        checks: Checks | None = None,
        gradient_norm: Tensor | None = None,
    ) -> None:
        """See `kernels.StepTable.step`."""
        self._check_step(grads, scaled, groups)
        device = self._steps.device
        check_scalars(
            "StepTable.step", device, inv_scale=inv_scale, found_inf=found_inf, norm=norm, gradient_norm=gradient_norm
        )
        factor = None if inv_scale is None else inv_scale.double()
        if norm is not None:
            clip = clip_factor(norm, max_norm)
            factor = clip if factor is None else factor * clip
        factors = [factor if s == 1 else None for s in scaled]
        rows = [i for i, g in enumerate(grads) if g is not None]
        if checks is None and self._formula.reads_sums:
            checks = checks_of(grads)
        if self._formula.reads_norm_of_all and gradient_norm is None and checks is not None:
            squares = [checks.sum_squares[i] * one_or(factors[i]) * one_or(factors[i]) for i in rows]
            gradient_norm = torch.stack(squares).sum().sqrt().float() if squares else None
        skips = None if found_inf is None else found_inf != 0
        for i in rows:
            grad = grads[i]
            assert grad is not None
            group = groups[self._groups[i]]
            row = Row(
                step=self._steps[i] + 1,
                factor=factors[i],
                norm=None if self._norms is None else self._norms[i],
                checks=None if checks is None else Checks(*(c[i] for c in checks)),
                gradient_norm=gradient_norm,
            )
            before = _weight(self._weights[i], self._copies[i], self._adopts)
            state = State(before, _wide(self._state1[i]), _wide(self._state2[i]), row.norm)
            new = group.update(_gradient(grad, group, row), state, row)
            chances: tuple[Tensor | None, Tensor | None] = (None, None)
            if _is_narrow(self._state1[i]):
                chances = halves.noise(row.step, self._weights[i])
            weight, copy = new.weight, new.weight
            if _is_remainder(self._copies[i]):
                weight, copy = halves.split(new.weight)
            for old, value in [
                (self._weights[i], weight),
                (self._copies[i], copy),
                (self._state1[i], _rounded(new.state1, chances[0])),
                (self._state2[i], _rounded(new.state2, chances[1])),
                (row.norm, new.norm),
                (self._steps[i], row.step),
            ]:
                if old is not None and value is not None:
                    _write(old, value, skips)

    def _check_step(self, grads: TensorList, scaled: Sequence[int], groups: Sequence[Formula]) -> None:
        op = "StepTable.step"
        check_lists(op, {"weights": self._weights, "grads": grads}, device=self._steps.device)
        n = len(self._weights)
        if len(scaled) != n:
            raise AmpValueError(f"{op}: scaled has {len(scaled)} entries, but weights has {n}.")
        for i, (grad, group) in enumerate(zip(grads, self._groups, strict=True)):
            if group >= len(groups):
                raise AmpValueError(f"{op}: weights[{i}] is in group {group} of {len(groups)}.")
            missing = [field.name for field in fields(self._formula) if not hasattr(groups[group], field.name)]
            if missing:
                raise AmpTypeError(
                    f"{op}: groups holds no hyperparameters of {self._name}: there is no {missing[0]} in it."
                )
            if grad is not None and (
                (groups[group].needs_state1 and self._state1[i] is None)
                or (self._formula.needs_state2 and self._state2[i] is None)
            ):
                raise AmpValueError(f"{op}: weights[{i}] has a gradient, but no optimizer state.")
        if not self._was_stepped:
            check_apart(op, self._written, {"grads": grads}, self._weights)
            self._was_stepped = True

    def _memory(self) -> list[tuple[int, torch.dtype, torch.Size, tuple[int, ...]] | None]:
        return [
            None if t is None else (address_of(t), t.dtype, t.shape, t.stride())
            for tensors in (self._weights, self._copies, self._state1, self._state2)
            for t in tensors
        ]


def _check_halves(weights: Sequence[Tensor], copies: TensorList, state1: TensorList, state2: TensorList) -> None:
    for i, (w, copy, s1, s2) in enumerate(zip(weights, copies, state1, state2, strict=True)):
        if _is_remainder(copy) and w is not None and w.dtype is not torch.bfloat16:
            raise AmpValueError(
                f"StepTable: copies[{i}] is a remainder, which only bfloat16 weights have, but weights[{i}] is "
                f"{w.dtype}."
            )
        if s1 is not None and s2 is not None and s1.dtype is not s2.dtype:
            raise AmpValueError(
                f"StepTable: state1[{i}] is {s1.dtype}, and state2[{i}] is {s2.dtype}, but both moments "
                "must have one type."
            )


def _is_remainder(copy: Tensor | None) -> bool:
    return copy is not None and copy.dtype is halves.REMAINDER


def _is_narrow(state: Tensor | None) -> bool:
    return state is not None and state.dtype is not torch.float32


def _weight(weight: Tensor, copy: Tensor | None, adopts: bool) -> Tensor:
    if copy is not None and _is_remainder(copy):
        return halves.joined(weight, copy)
    is_followed = adopts and copy is not None and weight.dtype is torch.float32 is not copy.dtype
    return followed(weight, copy) if is_followed and copy is not None else weight.float()


def _wide(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.float()


def _rounded(value: Tensor | None, chance: Tensor | None) -> Tensor | None:
    return value if value is None or chance is None else halves.by_chance(value, chance)


def _gradient(grad: Tensor, group: Formula, row: Row) -> Tensor:
    wide = grad.float() if row.factor is None else times(grad.float(), row.factor)
    return -wide if group.maximize else wide


def _write(tensor: Tensor, value: Tensor, skips: Tensor | None) -> None:
    value = value.to(tensor.dtype)
    tensor.copy_(value if skips is None else torch.where(skips, tensor, value))
