"""Hyperparameters and step of each optimizer in plain PyTorch, which the compiled kernels must match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from amp_engine.kernels.backend import Checks


class State(NamedTuple):
    """The weight and state that an update reads and returns; None for missing state. All float32, or all float64."""

    weight: Tensor
    state1: Tensor | None
    state2: Tensor | None
    norm: Tensor | None = None  # shape []


class Row(NamedTuple):
    """The other tensors that one tensor's update reads, each of shape []."""

    step: Tensor  # the number of this step, from 1
    factor: Tensor | None  # float64; the gradient is multiplied by it
    norm: Tensor | None
    checks: Checks | None
    gradient_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The hyperparameters of one parameter group, and the update that they belong to.

    Attributes:
        lr: learning rate; a float, or a float32 tensor of shape [].
        maximize: the gradient is negated.
        needs_state2: True if tensors have a second state beside the first.
        keeps_norm: True if a tensor has a norm as state.
        reads_sums: True if the step needs the norm of each gradient.
        reads_norm_of_all: True if the step needs the norm of all gradients.
    """

    lr: float | Tensor
    maximize: bool = False
    needs_state2: ClassVar[bool] = False
    keeps_norm: ClassVar[bool] = False
    reads_sums: ClassVar[bool] = False
    reads_norm_of_all: ClassVar[bool] = False

    @property
    def needs_state1(self) -> bool:
        """True if tensors have the first state."""
        return True

    def update(self, grad: Tensor, old: State, row: Row) -> State:
        """Compute the step of one tensor.

        Args:
            grad: of the weight's shape and type: unscaled, clipped, negated if `maximize`.
            old: weight and state before the step.
            row: the other inputs.

        Returns:
            Weight and state after the step; None for missing or dropped state.
        """
        raise NotImplementedError

    def rate(self) -> float | Tensor:
        """Return the learning rate as a float, or as a tensor if reading it would wait for a device."""
        lr = self.lr
        return lr if isinstance(lr, float | int) else lr.item() if lr.device.type == "cpu" else lr.double()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(Formula):
    """Adam (Kingma & Ba 2015, algorithm 1) and AdamW (Loshchilov & Hutter 2019, algorithm 2).

    Attributes:
        beta1, beta2: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: of the gradient (L2), or of the weight itself if `decoupled`.
        decoupled: weight decay acts on the weight, as in AdamW.
        bias_correction: moments are divided by 1 - beta**step.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    bias_correction: bool = True
    needs_state2: ClassVar[bool] = True

    def update(self, grad: Tensor, old: State, row: Row) -> State:
        """See `Formula.update`."""
        lr = self.rate()
        weight, exp_avg, exp_avg_sq, _ = old
        assert exp_avg is not None
        assert exp_avg_sq is not None
        if self.decoupled:
            weight = times(weight, 1 - lr * self.weight_decay)
        else:
            grad = grad.add(old.weight, alpha=self.weight_decay)
        exp_avg = exp_avg.lerp(grad, 1 - self.beta1)
        exp_avg_sq = (exp_avg_sq * self.beta2).addcmul(grad, grad, value=1 - self.beta2)
        denominator = times(exp_avg_sq.sqrt(), _bias(self.bias_correction, row.step, self.beta2).rsqrt()).add(self.eps)
        weight = weight - times(exp_avg / denominator, lr / _bias(self.bias_correction, row.step, self.beta1))
        return State(weight, exp_avg, exp_avg_sq)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(Formula):
    """SGD with momentum, by the same calls as torch.optim.SGD, so that it rounds in the same places.

    Attributes:
        momentum, dampening, nesterov: as in torch.optim.SGD.
        weight_decay: of the gradient.
        decay_after_momentum: the weight decay is added after the momentum.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    decay_after_momentum: bool = False

    @property
    def needs_state1(self) -> bool:
        """True if `momentum` is not 0."""
        return self.momentum != 0

    def update(self, grad: Tensor, old: State, row: Row) -> State:
        """See `Formula.update`."""
        weight, momentum_buffer, _, _ = old
        if self.weight_decay != 0 and not self.decay_after_momentum:
            grad = grad.add(weight, alpha=self.weight_decay)
        if self.momentum != 0:
            assert momentum_buffer is not None
            later = (momentum_buffer * self.momentum).add(grad, alpha=1 - self.dampening)
            momentum_buffer = torch.where(row.step == 1, grad, later)
            grad = grad.add(momentum_buffer, alpha=self.momentum) if self.nesterov else momentum_buffer
        else:
            momentum_buffer = None
        if self.weight_decay != 0 and self.decay_after_momentum:
            grad = grad.add(weight, alpha=self.weight_decay)
        return State(minus(weight, self.rate(), grad), momentum_buffer, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(Formula):
    """Adagrad (Duchi et al. 2011, equation 1).

    Attributes:
        eps: added to the root of the sum.
        weight_decay: of the gradient (L2), or of the weight itself if `decoupled`.
        lr_decay: the learning rate is divided by 1 + (step - 1) * lr_decay.
        decoupled: weight decay acts on the weight.
    """

    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    decoupled: bool = False

    def update(self, grad: Tensor, old: State, row: Row) -> State:
        """See `Formula.update`."""
        weight, total, _, _ = old
        assert total is not None
        if not self.decoupled:
            grad = grad.add(weight, alpha=self.weight_decay)
        total = total.addcmul(grad, grad)
        update = grad / total.sqrt().add(self.eps)
        if self.decoupled:
            update = update.add(weight, alpha=self.weight_decay)
        lr = self.rate() if self.lr_decay == 0 else self.rate() / (1 + (row.step.double() - 1) * self.lr_decay)
        return State(minus(weight, lr, update), total, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NovoGrad(Formula):
    """NovoGrad (Ginsburg et al. 2019, algorithm 1, which keeps the square of the norm).

    Attributes:
        beta1, beta2: decay of the first moment, and of the norm.
        eps: added to the norm.
        weight_decay: of the weight, or of the first moment if `decay_inside_moment`.
        bias_correction: moments are divided by 1 - beta**step.
        grad_averaging: the gradient enters the first moment times 1 - beta1, else times 1.
        decay_inside_moment: the weight decay is added to the normalized gradient, before the first moment.
        infinity_norm: the norm is the largest magnitude.
        init_zero: the norm starts from 0, not from the norm of the first gradient.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True
    grad_averaging: bool = True
    decay_inside_moment: bool = False
    infinity_norm: bool = False
    init_zero: bool = False
    keeps_norm: ClassVar[bool] = True
    reads_sums: ClassVar[bool] = True

    def update(self, grad: Tensor, old: State, row: Row) -> State:
        """See `Formula.update`."""
        lr, checks = self.rate(), row.checks
        weight, exp_avg, _, norm = old
        assert exp_avg is not None
        assert norm is not None
        assert checks is not None
        size = checks.largest.double() if self.infinity_norm else checks.sum_squares.sqrt()
        size = size * one_or(row.factor)
        before = torch.where(row.step == 1, torch.zeros_like(size) if self.init_zero else size, norm.double())
        if self.infinity_norm:
            blended = self.beta2 * before + (1 - self.beta2) * size
        else:
            blended = (self.beta2 * before.square() + (1 - self.beta2) * size.square()).sqrt()
        inv_denominator = (blended / _bias(self.bias_correction, row.step, self.beta2).sqrt() + self.eps).reciprocal()
        beta3 = 1 - self.beta1 if self.grad_averaging else 1
        inv_bias1 = _bias(self.bias_correction, row.step, self.beta1).reciprocal()
        if self.decay_inside_moment:
            grad = times(grad, inv_denominator).add(weight, alpha=self.weight_decay)
            exp_avg = (exp_avg * self.beta1).add(grad, alpha=beta3)
            update = times(exp_avg, inv_bias1)
        else:
            exp_avg = (exp_avg * self.beta1).add(grad, alpha=beta3)
            update = times(exp_avg, inv_bias1 * inv_denominator).add(weight, alpha=self.weight_decay)
        return State(minus(weight, lr, update), exp_avg, None, blended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lamb(Formula):
    """LAMB (You et al. 2020, algorithm 2).

    Attributes:
        beta1, beta2: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: of the gradient (L2), or of the weight itself if `decoupled`.
        max_grad_norm: the norm of all gradients is clipped to this; 0: not clipped.
        decoupled: weight decay acts on the weight.
        bias_correction: moments are divided by 1 - beta**step.
        grad_averaging: the gradient enters the first moment times 1 - beta1, else times 1.
        use_nvlamb: the trust ratio also applies where the weight decay is 0.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    decoupled: bool = False
    bias_correction: bool = True
    grad_averaging: bool = True
    use_nvlamb: bool = False
    needs_state2: ClassVar[bool] = True
    reads_sums: ClassVar[bool] = True
    reads_norm_of_all: ClassVar[bool] = True

    def update(self, grad: Tensor, old: State, row: Row) -> State:
        """See `Formula.update`."""
        weight, exp_avg, exp_avg_sq, _ = old
        assert exp_avg is not None
        assert exp_avg_sq is not None
        if self.max_grad_norm > 0 and row.gradient_norm is not None:
            grad = times(grad, (row.gradient_norm.double() / self.max_grad_norm).clamp(min=1).reciprocal())
        if not self.decoupled:
            grad = grad.add(weight, alpha=self.weight_decay)
        exp_avg = (exp_avg * self.beta1).add(grad, alpha=1 - self.beta1 if self.grad_averaging else 1)
        exp_avg_sq = (exp_avg_sq * self.beta2).addcmul(grad, grad, value=1 - self.beta2)
        denominator = times(exp_avg_sq.sqrt(), _bias(self.bias_correction, row.step, self.beta2).rsqrt()).add(self.eps)
        update = times(exp_avg, _bias(self.bias_correction, row.step, self.beta1).reciprocal()) / denominator
        if self.decoupled:
            update = update.add(weight, alpha=self.weight_decay)
        lr = self.rate()
        if self.use_nvlamb or self.weight_decay != 0:
            of_weight, of_update = (torch.linalg.vector_norm(t, dtype=torch.float64) for t in (weight, update))
            lr = torch.where((of_weight > 0) & (of_update > 0), of_weight / of_update, torch.ones_like(of_weight)) * lr
        return State(minus(weight, lr, update), exp_avg, exp_avg_sq)


FORMULAS: dict[str, type[Formula]] = {
    formula.__name__.lower(): formula for formula in (Adam, Sgd, Adagrad, NovoGrad, Lamb)
}
"""The formulas by name, the `formula` of a `step_table`."""


def _bias(corrects: bool, step: Tensor, beta: float) -> Tensor:
    """Return 1 - beta**step, float64; 1 without bias correction."""
    step = step.double()
    return 1 - beta**step if corrects else torch.ones_like(step)


def times(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """Return `tensor * factor`, with the factor cast to the tensor's type: a 0-d float64 would widen a 0-d tensor."""
    return tensor * (factor.to(tensor.dtype) if isinstance(factor, Tensor) else factor)


def minus(weight: Tensor, lr: float | Tensor, update: Tensor) -> Tensor:
    """Return `weight - lr * update`."""
    return weight - times(update, lr) if isinstance(lr, Tensor) else weight.add(update, alpha=-lr)


def one_or(factor: Tensor | None) -> Tensor | float:
    """Return `factor`, or 1 for None."""
    return 1.0 if factor is None else factor
