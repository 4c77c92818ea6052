"""FusedLAMB: LAMB in two passes."""

from __future__ import annotations

from amp_engine.kernels.formulas import Lamb
from amp_engine.optimizers.base import FusedOptimizer, Params, check_betas, check_not_negative, refuse_amsgrad
from amp_engine.optimizers.rules import Rule, hyperparameters


class FusedLAMB(FusedOptimizer):
    """LAMB (You et al. 2020): Adam's step, scaled per tensor by |weight| / |step|.

    Gradients are clipped by their norm over all groups, and not overwritten. State per parameter: `step`, `exp_avg`,
    `exp_avg_sq`. The step before scaling is kept in float32 scratch memory of the parameters' size.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta^t.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: factor of the weight decay. If it is 0, tensors are not scaled without `use_nvlamb`.
        amsgrad: refused, as in apex.
        adam_w_mode: decoupled weight decay; False adds it to the gradient.
        grad_averaging: let the gradient enter the first moment times 1 - beta1, not times 1.
        set_grad_none: default of `set_to_none` in `zero_grad`.
        max_grad_norm: clip the gradients to this 2-norm; 0: do not clip. A group's own value applies to its tensors.
        use_nvlamb: scale tensors without weight decay too.

    Raises AmpStateError for `amsgrad`, AmpValueError for values out of range.
    """

    rule = Rule("lamb", "exp_avg", "exp_avg_sq", hyperparameters(Lamb, decoupled="adam_w_mode"))
    settings = ("set_grad_none", "adam_w_mode", "use_nvlamb")

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        refuse_amsgrad(type(self).__name__, amsgrad)
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        check_betas(betas)
        self.adam_w_mode = bool(adam_w_mode)
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "adam_w_mode": bool(adam_w_mode),
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults, set_grad_none)
