"""The plain PyTorch truth of every operation, on any device. None of them waits for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amp_engine.errors import AmpValueError
from amp_engine.kernels.hyperparameters import Hyperparameters
from amp_engine.kernels.refusals import TensorList, check_apart, check_lists, check_scalars, check_vector


class Checks(NamedTuple):
    """What one pass over n tensors found, of the values before the pass wrote any; on the device of the tensors.

    Attributes:
        nonfinite: bool, shape [n]: whether the tensor holds an inf or a NaN.
        sum_squares: float64, shape [n].
        largest: float32, shape [n]: largest magnitude; NaN if there is one.
    """

    nonfinite: Tensor
    sum_squares: Tensor
    largest: Tensor


@torch.no_grad()
def nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Which of `tensors` hold an inf or a NaN.

    Args:
        tensors: n dense floating tensors of any shapes and floating types, all on one device.

    Returns:
        bool tensor of shape [n] on that device. The largest magnitude decides: a *finite* tensor whose
        squares overflow is not reported.
    """
    return ~torch.isfinite(_per_tensor(tensors, math.inf, torch.float64))


@torch.no_grad()
def check(tensors: Sequence[Tensor]) -> Checks:
    """Look at every element once, see `Checks`."""
    check_lists("check", {"tensors": tensors})
    return _check(tensors)


@torch.no_grad()
def l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(2-norm over all of `tensors`, of each of them): float32, shapes [] and [n]."""
    check_lists("l2norm", {"tensors": tensors})
    sum_squares = _sum_squares(tensors)
    return sum_squares.sum().sqrt().float(), sum_squares.sqrt().float()


@torch.no_grad()
def unscaled(tensors: Sequence[Tensor], inv_scale: Tensor) -> list[Tensor]:
    """`[t.float() * inv_scale for t in tensors]`: float32, shapes and strides as given.

    Args:
        inv_scale: float32, shape [], on the device of `tensors`.
    """
    check_lists("unscaled", {"tensors": tensors})
    check_scalars("unscaled", _device(tensors), inv_scale=inv_scale)
    copies = [t.to(torch.float32, copy=True) for t in tensors]
    if copies:
        torch._foreach_mul_(copies, inv_scale)
    return copies


@torch.no_grad()
def unscale_(tensors: Sequence[Tensor], inv_scale: Tensor) -> Checks:
    """`t *= inv_scale` for each t, rounded once to the type of t.

    Args:
        inv_scale: float32, shape [], on the device of `tensors`.
    """
    check_lists("unscale_", {"tensors": tensors}, ["tensors"])
    check_scalars("unscale_", _device(tensors), inv_scale=inv_scale)
    checks = _check(tensors)
    _scale_(tensors, tensors, inv_scale)
    return checks


@torch.no_grad()
def scale_(outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: Tensor) -> Checks:
    """`output[...] = input * factor` pairwise, computed in float32 and rounded once to the type of each output.

    Args:
        factor: float32, shape [], on the device of `inputs`.
    """
    check_lists("scale_", {"inputs": inputs, "outputs": outputs}, ["outputs"])
    check_scalars("scale_", _device(inputs), factor=factor)
    checks = _check(inputs)
    _scale_(outputs, inputs, factor)
    return checks


@torch.no_grad()
def axpby_(
    outputs: Sequence[Tensor], xs: Sequence[Tensor], ys: Sequence[Tensor], a: Tensor | None, b: Tensor | None
) -> Checks:
    """`output[...] = fma(a, x, b * y)` triple by triple, in float32, rounded once to the type of each output.

    Args:
        outputs: each possibly its x or its y.
        a, b: float32, shape [], on the device of `xs`; None is 1.

    Returns:
        What was found in `xs`.
    """
    check_lists("axpby_", {"xs": xs, "ys": ys, "outputs": outputs}, ["outputs"])
    check_scalars("axpby_", _device(xs), a=a, b=b)
    checks = _check(xs)
    for output, x, y in zip(outputs, xs, ys, strict=True):
        by = y.float() if b is None else y.float() * b
        # In float64 the product is exact, so the sum is rounded as by an fma, but for ties of float32.
        ax = x.double() if a is None else x.double() * a.double()
        output.copy_((ax + by.double()).float())
    return checks


@torch.no_grad()
def accumulate_(totals: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """`total += tensor` pairwise, in the type of `totals`, which may be any."""
    if totals:
        torch._foreach_add_(list(totals), list(tensors))


@torch.no_grad()
def cast_copy_(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """`output[...] = input` pairwise, rounded to nearest even into the type of each output."""
    check_lists("cast_copy_", {"inputs": inputs, "outputs": outputs}, ["outputs"])
    if outputs:
        torch._foreach_copy_(list(outputs), list(inputs))


@torch.no_grad()
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis_tracker: Tensor | None = None,
    hysteresis: int = 1,
    dynamic: bool = True,
    inv_scale_used: Tensor | None = None,
    found_inf_used: Tensor | None = None,
) -> None:
    """Adjust a dynamic loss scale after one backward, in place.

        inv_scale_used = 1 / scale
        found_inf_used, found_inf = found_inf, 0
        if not dynamic:
            growth_tracker += 1
        elif found_inf_used != 0:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(min_scale, scale * backoff_factor)
        else:
            growth_tracker += 1
            hysteresis_tracker = hysteresis
            if growth_tracker >= growth_interval:
                grown = min(max_scale, scale * growth_factor)
                scale = grown if isfinite(grown) else scale
                growth_tracker = 0

    Args:
        scale: float32, shape []. Computed in float64, rounded once.
        growth_tracker: int32, shape []: clean backwards since the scale last moved.
        found_inf: float32, shape []. Tested `!= 0`, since it may be a sum over devices or ranks. Left alone unless
            there is a `found_inf_used`.
        hysteresis_tracker: int32, shape []: overflows that are still let pass. None: the first one counts.
        dynamic: False: the scale stays, and the count runs on.
        inv_scale_used: float32, shape [], written.
        found_inf_used: float32, shape [], written.
    """
    device = scale.device
    check_scalars(
        "update_scale_",
        device,
        scale=scale,
        found_inf=found_inf,
        inv_scale_used=inv_scale_used,
        found_inf_used=found_inf_used,
    )
    check_scalars(
        "update_scale_", device, torch.int32, growth_tracker=growth_tracker, hysteresis_tracker=hysteresis_tracker
    )
    wide = scale.double()
    bad = found_inf != 0
    if inv_scale_used is not None:
        inv_scale_used.copy_(wide.reciprocal())
    if found_inf_used is not None:
        found_inf_used.copy_(found_inf)
        found_inf.zero_()
    if not dynamic:
        growth_tracker.add_(1)
        return
    backs_off = bad
    if hysteresis_tracker is not None:
        left = torch.where(bad, hysteresis_tracker - 1, hysteresis)
        hysteresis_tracker.copy_(left)
        backs_off = bad & (left <= 0)
    clean = torch.where(bad, 0, growth_tracker + 1)
    grows = clean >= growth_interval
    backed_off = (wide * backoff_factor).clamp(min=min_scale).float()
    grown = (wide * growth_factor).clamp(max=max_scale).float()
    raised = grows & ~bad & torch.isfinite(grown)
    scale.copy_(torch.where(backs_off, backed_off, torch.where(raised, grown, scale)))
    growth_tracker.copy_(torch.where(grows, 0, clean))


class StepTable:
    """The tensors of one optimizer, stepped together.

    Args:
        kind: "adam", "sgd", "adagrad", "novograd" or "lamb".
        weights: n masters (float32), or parameters (of any of the three types).
        copies: n low-precision parameters that the new weights are rounded into, or None.
        state1: n, float32: exp_avg, momentum buffer or sum; None where the optimizer keeps none.
        state2: n, float32: exp_avg_sq; None where the optimizer keeps none.
        groups: n places in the list of groups that `step` is given.
        steps: float32, shape [n], contiguous: how many steps each tensor has had.
        norms: float32, shape [n], contiguous: NovoGrad's norms.
    """

    def __init__(
        self,
        kind: str,
        weights: Sequence[Tensor],
        copies: TensorList,
        state1: TensorList,
        state2: TensorList,
        groups: Sequence[int],
        steps: Tensor,
        norms: Tensor | None = None,
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
        *,
        inv_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        norm: Tensor | None = None,
        max_norm: float = math.inf,
        checks: Checks | None = None,
        gradient_norm: Tensor | None = None,
    ) -> None:
        """One step of every tensor that has a gradient; of none, counts included, where `found_inf != 0`.

        Args:
            grads: n, of the weights' shapes and strides, or None. Not written.
            scaled: n: which of them are multiplied by `inv_scale * min(1, max_norm / (norm + 1e-6))`.
            groups: hyperparameters of each group.
            inv_scale: float32, shape []; None is 1.
            found_inf: float32, shape []; None is 0.
            norm: float32, shape []: of all unscaled gradients. None: not clipped.
            checks: of exactly these gradients; None: LAMB and NovoGrad read them once more.
            gradient_norm: float32, shape []: LAMB clips by it; None: by that over all gradients of this call.
        """
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
            checks = _check(grads)
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


def _scale_(outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: Tensor) -> None:
    for output, given in zip(outputs, inputs, strict=True):
        # A 0-d factor takes the type of the tensor it multiplies, and 1/scale may be below half's range.
        output.copy_(given.float() * factor)


def _check(tensors: TensorList) -> Checks:
    largest = _per_tensor(tensors, math.inf, torch.float32)
    return Checks(~torch.isfinite(largest), _sum_squares(tensors), largest)


def _sum_squares(tensors: TensorList) -> Tensor:
    return _per_tensor(tensors, 2, torch.float64).square()


def _per_tensor(tensors: TensorList, order: float, dtype: torch.dtype) -> Tensor:
    """The norm of each tensor, shape [n]; 0 where there is none, or no element."""
    filled = [t for t in tensors if t is not None and t.numel()]
    # A maximum needs no wider type than the values have.
    found = iter(torch._foreach_norm(filled, order, dtype=None if order == math.inf else dtype) if filled else [])
    zero = torch.zeros((), dtype=dtype, device=_device(tensors))
    norms = [next(found).to(dtype) if t is not None and t.numel() else zero for t in tensors]
    return torch.stack(norms) if norms else zero.new_zeros(0)


def _device(tensors: TensorList) -> torch.device | None:
    """Where the first tensor is; None, which is the default device, if there is none."""
    return next((t.device for t in tensors if t is not None), None)
