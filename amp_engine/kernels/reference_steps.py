"""The plain PyTorch truth of the steps, on any device. None of them waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amp_engine.errors import AmpValueError
from amp_engine.kernels.backend import Checks, TensorList
from amp_engine.kernels.hyperparameters import Hyperparameters
from amp_engine.kernels.reference_lists import checks_of
from amp_engine.kernels.refusals import check_apart, check_lists, check_scalars, check_vector


class StepTable:
    """The tensors of one optimizer, stepped together; see `kernels.StepTable`."""

    def __init__(
        self,
        kind: str,
        weights: Sequence[Tensor],
        copies: TensorList,
        state1: TensorList,
        state2: TensorList,
        groups: Sequence[int],
        steps: Tensor,
        norms: Tensor | None,
    ) -> None:
        if kind not in _UPDATES:
            raise AmpValueError(f"StepTable: kind is {kind!r}, but must be adam, sgd, adagrad, novograd or lamb.")
        lists = {"weights": weights, "copies": copies, "state1": state1, "state2": state2}
        device, n = steps.device, len(weights)
        check_lists("StepTable", lists, float32=("state1", "state2"), device=device)
        if len(groups) != n:
            raise AmpValueError(f"StepTable: groups has {len(groups)} entries, but weights has {n}.")
        check_vector("StepTable", "steps", steps, n, torch.float32, device)
        check_vector("StepTable", "norms", norms, n, torch.float32, device)
        if kind == "novograd" and norms is None:
            raise AmpValueError(f"StepTable: novograd keeps norms; pass a float32 tensor of shape [{n}].")
        self._kind = kind
        self._weights, self._copies = list(weights), list(copies)
        self._state1, self._state2 = list(state1), list(state2)
        self._groups = list(groups)
        self._steps, self._norms = steps, norms
        written: dict[str, TensorList] = {**lists, "steps": [steps], "norms": [norms]}
        check_apart("StepTable", written, {})
        self._written = written
        self._was_stepped = False
        self._built_on = self._memory()

    def is_current(self) -> bool:
        """Whether every tensor still has the memory that it had."""
        return self._memory() == self._built_on

    @torch.no_grad()
    def step(
        self,
        grads: TensorList,
        scaled: Sequence[bool],
        groups: Sequence[Hyperparameters],
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
        norm: Tensor | None,
        max_norm: float,
        checks: Checks | None,
        gradient_norm: Tensor | None,
    ) -> None:
        """See `kernels.StepTable.step`."""
        self._check_step(grads, scaled, groups)
        device = self._steps.device
        check_scalars(
            "StepTable.step", device, inv_scale=inv_scale, found_inf=found_inf, norm=norm, gradient_norm=gradient_norm
        )
        factor = None if inv_scale is None else inv_scale.double()
        if norm is not None:
            clip = (max_norm / (norm.double() + 1e-6)).clamp(max=1)
            factor = clip if factor is None else factor * clip
        factors = [factor if s else None for s in scaled]
        rows = [i for i, g in enumerate(grads) if g is not None]
        if checks is None and self._kind in ("novograd", "lamb"):
            checks = checks_of(grads)
        if self._kind == "lamb" and gradient_norm is None and checks is not None:
            squares = [checks.sum_squares[i] * _one_or(factors[i]) * _one_or(factors[i]) for i in rows]
            gradient_norm = torch.stack(squares).sum().sqrt().float() if squares else None
        skips = None if found_inf is None else found_inf != 0
        for i in rows:
            grad = grads[i]
            assert grad is not None
            row = _Row(
                group=groups[self._groups[i]],
                step=self._steps[i] + 1,
                factor=factors[i],
                norm=None if self._norms is None else self._norms[i],
                checks=None if checks is None else Checks(*(c[i] for c in checks)),
                gradient_norm=gradient_norm,
            )
            state = _State(self._weights[i].float(), self._state1[i], self._state2[i], row.norm)
            new = _UPDATES[self._kind](_gradient(grad, row), state, row)
            _write(self._weights[i], new.weight, skips)
            for old, value in [
                (self._copies[i], new.weight),
                (self._state1[i], new.state1),
                (self._state2[i], new.state2),
                (row.norm, new.norm),
                (self._steps[i], row.step),
            ]:
                if old is not None and value is not None:
                    _write(old, value, skips)

    def _check_step(self, grads: TensorList, scaled: Sequence[bool], groups: Sequence[Hyperparameters]) -> None:
        op = "StepTable.step"
        check_lists(op, {"weights": self._weights, "grads": grads}, device=self._steps.device)
        n = len(self._weights)
        if len(scaled) != n:
            raise AmpValueError(f"{op}: scaled has {len(scaled)} entries, but weights has {n}.")
        for i, (grad, group) in enumerate(zip(grads, self._groups, strict=True)):
            if group >= len(groups):
                raise AmpValueError(f"{op}: weights[{i}] is in group {group} of {len(groups)}.")
            needs_state1 = self._kind != "sgd" or groups[group].momentum != 0
            needs_state2 = self._kind in ("adam", "lamb")
            if grad is not None and (
                (needs_state1 and self._state1[i] is None) or (needs_state2 and self._state2[i] is None)
            ):
                raise AmpValueError(f"{op}: weights[{i}] has a gradient, but no optimizer state.")
        if not self._was_stepped:
            check_apart(op, self._written, {"grads": grads}, self._weights)
            self._was_stepped = True

    def _memory(self) -> list[tuple[int, torch.dtype, torch.Size, tuple[int, ...]] | None]:
        return [
            None if t is None else (t.data_ptr(), t.dtype, t.shape, t.stride())
            for tensors in (self._weights, self._copies, self._state1, self._state2)
            for t in tensors
        ]


class _State(NamedTuple):
    """What one tensor's update reads and returns; None where there is none. All float32."""

    weight: Tensor
    state1: Tensor | None
    state2: Tensor | None
    norm: Tensor | None = None  # shape []


class _Row(NamedTuple):
    """What else one tensor's update reads. Tensors have shape []."""

    group: Hyperparameters
    step: Tensor  # the number of this step, from 1
    factor: Tensor | None  # float64, of the gradient
    norm: Tensor | None
    checks: Checks | None
    gradient_norm: Tensor | None

    @property
    def lr(self) -> float | Tensor:
        """A float; or a tensor where reading it would wait for a device."""
        lr = self.group.lr
        return lr if isinstance(lr, float | int) else lr.item() if lr.device.type == "cpu" else lr.double()

    def bias(self, beta: float) -> Tensor:
        """1 - beta**step, float64; 1 without bias correction."""
        step = self.step.double()
        return 1 - beta**step if self.group.bias_correction else torch.ones_like(step)


def _adam(grad: Tensor, old: _State, row: _Row) -> _State:
    # Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2.
    group, lr = row.group, row.lr
    weight, exp_avg, exp_avg_sq, _ = old
    assert exp_avg is not None
    assert exp_avg_sq is not None
    if group.decoupled:
        weight = _times(weight, 1 - lr * group.weight_decay)
    else:
        grad = grad.add(old.weight, alpha=group.weight_decay)
    exp_avg = exp_avg.lerp(grad, 1 - group.beta1)
    exp_avg_sq = (exp_avg_sq * group.beta2).addcmul(grad, grad, value=1 - group.beta2)
    denominator = _times(exp_avg_sq.sqrt(), row.bias(group.beta2).rsqrt()).add(group.eps)
    weight = weight - _times(exp_avg / denominator, lr / row.bias(group.beta1))
    return _State(weight, exp_avg, exp_avg_sq)


def _sgd(grad: Tensor, old: _State, row: _Row) -> _State:
    # The calls of torch.optim.SGD, each of which rounds as it does there.
    group = row.group
    weight, momentum_buffer, _, _ = old
    if group.weight_decay != 0 and not group.decay_after_momentum:
        grad = grad.add(weight, alpha=group.weight_decay)
    if group.momentum != 0:
        assert momentum_buffer is not None
        later = (momentum_buffer * group.momentum).add(grad, alpha=1 - group.dampening)
        momentum_buffer = torch.where(row.step == 1, grad, later)
        grad = grad.add(momentum_buffer, alpha=group.momentum) if group.nesterov else momentum_buffer
    else:
        momentum_buffer = None
    if group.weight_decay != 0 and group.decay_after_momentum:
        grad = grad.add(weight, alpha=group.weight_decay)
    return _State(_minus(weight, row.lr, grad), momentum_buffer, None)


def _adagrad(grad: Tensor, old: _State, row: _Row) -> _State:
    # Duchi et al. 2011, equation 1.
    group = row.group
    weight, total, _, _ = old
    assert total is not None
    if not group.decoupled:
        grad = grad.add(weight, alpha=group.weight_decay)
    total = total.addcmul(grad, grad)
    update = grad / total.sqrt().add(group.eps)
    if group.decoupled:
        update = update.add(weight, alpha=group.weight_decay)
    lr = row.lr if group.lr_decay == 0 else row.lr / (1 + (row.step.double() - 1) * group.lr_decay)
    return _State(_minus(weight, lr, update), total, None)


def _novograd(grad: Tensor, old: _State, row: _Row) -> _State:
    # Ginsburg et al. 2019, algorithm 1, which keeps the square of the norm.
    group, lr, checks = row.group, row.lr, row.checks
    weight, exp_avg, _, norm = old
    assert exp_avg is not None
    assert norm is not None
    assert checks is not None
    size = checks.largest.double() if group.infinity_norm else checks.sum_squares.sqrt()
    size = size * _one_or(row.factor)
    before = torch.where(row.step == 1, torch.zeros_like(size) if group.init_zero else size, norm.double())
    if group.infinity_norm:
        blended = group.beta2 * before + (1 - group.beta2) * size
    else:
        blended = (group.beta2 * before.square() + (1 - group.beta2) * size.square()).sqrt()
    inv_denominator = (blended / row.bias(group.beta2).sqrt() + group.eps).reciprocal()
    beta3 = 1 - group.beta1 if group.grad_averaging else 1
    inv_bias1 = row.bias(group.beta1).reciprocal()
    if group.decay_inside_moment:
        grad = _times(grad, inv_denominator).add(weight, alpha=group.weight_decay)
        exp_avg = (exp_avg * group.beta1).add(grad, alpha=beta3)
        update = _times(exp_avg, inv_bias1)
    else:
        exp_avg = (exp_avg * group.beta1).add(grad, alpha=beta3)
        update = _times(exp_avg, inv_bias1 * inv_denominator).add(weight, alpha=group.weight_decay)
    return _State(_minus(weight, lr, update), exp_avg, None, blended)


def _lamb(grad: Tensor, old: _State, row: _Row) -> _State:
    # You et al. 2020, algorithm 2.
    group = row.group
    weight, exp_avg, exp_avg_sq, _ = old
    assert exp_avg is not None
    assert exp_avg_sq is not None
    if group.max_grad_norm > 0 and row.gradient_norm is not None:
        grad = _times(grad, (row.gradient_norm.double() / group.max_grad_norm).clamp(min=1).reciprocal())
    if not group.decoupled:
        grad = grad.add(weight, alpha=group.weight_decay)
    exp_avg = (exp_avg * group.beta1).add(grad, alpha=1 - group.beta1 if group.grad_averaging else 1)
    exp_avg_sq = (exp_avg_sq * group.beta2).addcmul(grad, grad, value=1 - group.beta2)
    denominator = _times(exp_avg_sq.sqrt(), row.bias(group.beta2).rsqrt()).add(group.eps)
    update = _times(exp_avg, row.bias(group.beta1).reciprocal()) / denominator
    if group.decoupled:
        update = update.add(weight, alpha=group.weight_decay)
    lr = row.lr
    if group.use_nvlamb or group.weight_decay != 0:
        of_weight, of_update = (torch.linalg.vector_norm(t, dtype=torch.float64) for t in (weight, update))
        lr = torch.where((of_weight > 0) & (of_update > 0), of_weight / of_update, torch.ones_like(of_weight)) * lr
    return _State(_minus(weight, lr, update), exp_avg, exp_avg_sq)


_UPDATES: dict[str, Callable[[Tensor, _State, _Row], _State]] = {
    "adam": _adam,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "novograd": _novograd,
    "lamb": _lamb,
}


def _gradient(grad: Tensor, row: _Row) -> Tensor:
    wide = grad.float() if row.factor is None else _times(grad.float(), row.factor)
    return -wide if row.group.maximize else wide


def _times(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """`tensor * factor` with the factor rounded to float32 first; a 0-d float64 one would widen a 0-d tensor."""
    return tensor * (factor.float() if isinstance(factor, Tensor) else factor)


def _minus(weight: Tensor, lr: float | Tensor, update: Tensor) -> Tensor:
    return weight - _times(update, lr) if isinstance(lr, Tensor) else weight.add(update, alpha=-lr)


def _one_or(factor: Tensor | None) -> Tensor | float:
    return 1.0 if factor is None else factor


def _write(tensor: Tensor, value: Tensor, skips: Tensor | None) -> None:
    value = value.to(tensor.dtype)
    tensor.copy_(value if skips is None else torch.where(skips, tensor, value))
