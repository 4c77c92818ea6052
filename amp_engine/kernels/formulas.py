"""The hyperparameters of each optimizer that the kernels step; csrc/math/ has the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The hyperparameters of one parameter group.

    Attributes:
        lr: learning rate; a float, or a float32 tensor of shape [].
        maximize: the gradient is negated.
        needs_state2: True if tensors have a second state beside the first.
        keeps_norm: True if a tensor has a norm as state.
        reads_sums: True if the step needs the norm of each gradient.
    """

    lr: float | Tensor
    maximize: bool = False
    needs_state2: ClassVar[bool] = False
    keeps_norm: ClassVar[bool] = False
    reads_sums: ClassVar[bool] = False

    @property
    def needs_state1(self) -> bool:
        """True if tensors have the first state."""
        return True


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(Formula):
    """SGD with momentum, which rounds in the same places as torch.optim.SGD.

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


FORMULAS: dict[str, type[Formula]] = {
    formula.__name__.lower(): formula for formula in (Adam, Sgd, Adagrad, NovoGrad, Lamb)
}
"""The formulas by name, the `formula` of a `step_table`."""
