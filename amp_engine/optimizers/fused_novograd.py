"""FusedNovoGrad: NovoGrad in one pass."""

from __future__ import annotations

import math

from amp_engine.errors import AmpStateError
from amp_engine.kernels.formulas import Formula, NovoGrad
from amp_engine.optimizers.base import FusedOptimizer, Params, check_betas, check_not_negative, refuse_amsgrad
from amp_engine.optimizers.rules import Group, Rule, hyperparameters

_of_group = hyperparameters(NovoGrad, decay_inside_moment="reg_inside_moment", infinity_norm="norm_type")


def _hyperparameters(group: Group) -> Formula:
    return _of_group({**group, "norm_type": group["norm_type"] == 0})


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad (Ginsburg et al. 2019): the second moment is one number per tensor, kept as a norm, not its square.

    State per parameter: `step`, `exp_avg`, and `exp_avg_sq`, which is that norm, float32 of shape [].

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta^t.
        betas: decay of the moments.
        eps: added to the norm.
        weight_decay: factor of the weight decay.
        amsgrad: refused, as in apex.
        reg_inside_moment: add the weight decay before the first moment.
        grad_averaging: let the gradient enter the first moment times 1 - beta1, not times 1.
        norm_type: 2, or 0 or `math.inf` for the infinity norm.
        init_zero: start the second moment at 0 instead of at the first norm.
        set_grad_none: default of `set_to_none` in `zero_grad`.

    Raises AmpStateError for `amsgrad` and other norms, AmpValueError for values out of range.
    """

    rule = Rule("novograd", "exp_avg", None, _hyperparameters)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_amsgrad("FusedNovoGrad", amsgrad)
        if norm_type not in (0, 2, math.inf):
            raise AmpStateError(f"norm_type={norm_type!r}, but FusedNovoGrad takes 2, or 0 for the infinity norm.")
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": 2 if norm_type == 2 else 0,
            "init_zero": init_zero,
            "reg_inside_moment": reg_inside_moment,
        }
        super().__init__(params, defaults, set_grad_none)
