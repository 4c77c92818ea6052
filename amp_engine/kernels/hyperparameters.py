"""The hyperparameters of one parameter group, in the kernels' terms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What a step reads besides tensors. Each kind of step reads its own, see the functions `kernels.adam_` etc.

    Attributes:
        lr: learning rate; a float, or a float32 tensor of shape [].
        beta1, beta2: decay of the first and second moment.
        eps: added to denominators.
        weight_decay: of the gradient (L2), or of the weight itself if `decoupled`.
        momentum, dampening, nesterov: of SGD.
        lr_decay: of Adagrad.
        max_grad_norm: LAMB's clipping; 0 is none.
        decoupled: weight decay acts on the weight, as in AdamW.
        bias_correction: moments are divided by 1 - beta**step.
        maximize: the gradient is negated.
        decay_after_momentum: SGD adds the weight decay to the momentum's outcome.
        grad_averaging: the gradient enters the first moment times 1 - beta1, else times 1.
        use_nvlamb: LAMB has its trust ratio also where the weight decay is 0.
        decay_inside_moment: NovoGrad's first moment is of normalized and decayed gradients.
        infinity_norm: NovoGrad's norm is the largest magnitude.
        init_zero: NovoGrad's second moment starts from 0, not from the first norm.
    """

    lr: float | Tensor
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    lr_decay: float = 0.0
    max_grad_norm: float = 0.0
    decoupled: bool = False
    bias_correction: bool = True
    maximize: bool = False
    nesterov: bool = False
    decay_after_momentum: bool = False
    grad_averaging: bool = True
    use_nvlamb: bool = False
    decay_inside_moment: bool = False
    infinity_norm: bool = False
    init_zero: bool = False
