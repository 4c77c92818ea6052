"""FusedAdagrad: Adagrad in one pass."""

from __future__ import annotations

from amp_engine.kernels.formulas import Adagrad
from amp_engine.optimizers.base import FusedOptimizer, Params, check_not_negative
from amp_engine.optimizers.rules import Rule, hyperparameters


class FusedAdagrad(FusedOptimizer):
    """Adagrad (Duchi et al. 2011).

    State per parameter: `step`, `sum`, like torch.optim.Adagrad's. There is no decay of the learning rate.

    Args:
        params: parameters or groups.
        lr: learning rate.
        eps: added to the root of the sum.
        weight_decay: factor of the weight decay.
        set_grad_none: default of `set_to_none` in `zero_grad`.
        adagrad_w_mode: decoupled weight decay; False adds it to the gradient.

    Raises AmpValueError for negative values.
    """

    rule = Rule("adagrad", "sum", None, hyperparameters(Adagrad, decoupled="adagrad_w_mode"))
    settings = ("set_grad_none", "adagrad_w_mode")

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        self.adagrad_w_mode = adagrad_w_mode
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "adagrad_w_mode": adagrad_w_mode}
        super().__init__(params, defaults, set_grad_none)
