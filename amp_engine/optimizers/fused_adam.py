"""FusedAdam: Adam and AdamW in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from amp_engine.errors import AmpStateError
from amp_engine.kernels.formulas import Adam
from amp_engine.optimizers.base import FusedOptimizer, Params, check_betas, check_not_negative, refuse_amsgrad
from amp_engine.optimizers.rules import Rule, hyperparameters


class FusedAdam(FusedOptimizer):
    """Adam (Kingma & Ba 2015), by default with AdamW's decoupled weight decay (Loshchilov & Hutter 2019), as in apex.

    State per parameter: `step`, `exp_avg`, `exp_avg_sq`, like torch.optim.AdamW's: each class loads the other's state.

    Args:
        params: parameters or groups.
        lr: learning rate; a number, or a float32 tensor of shape [], which is read on its device.
        bias_correction: divide the moments by 1 - beta^t.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        adam_w_mode: decoupled weight decay; False adds it to the gradient.
        weight_decay: factor of the weight decay.
        amsgrad: refused, as in apex.
        set_grad_none: default of `set_to_none` in `zero_grad`.
        capturable: torch.amp.GradScaler leaves unscaling and skipping to the step, also for half gradients, without a
            host sync. CUDA graphs capture any step, also without `capturable`.
        master_weights: keep float32 masters of half parameters as state. Not needed under `amp.initialize`.

    Raises AmpStateError for `amsgrad`, and for `master_weights` without `capturable` as in apex.
    """

    rule = Rule("adam", "exp_avg", "exp_avg_sq", hyperparameters(Adam, decoupled="adam_w_mode"))
    settings = ("set_grad_none", "adam_w_mode", "capturable", "master_weights", "_step_supports_amp_scaling")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        refuse_amsgrad("FusedAdam", amsgrad)
        if master_weights and not capturable:
            raise AmpStateError(
                "FusedAdam(master_weights=True) needs capturable=True, as in apex.  Under amp.initialize leave both "
                "out: O2 keeps the masters."
            )
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        self.adam_w_mode = bool(adam_w_mode)
        self.capturable = capturable
        self._step_supports_amp_scaling = capturable  # see FusedMixedPrecisionLamb
        self.master_weights = master_weights
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": bool(adam_w_mode),
        }
        super().__init__(params, defaults, set_grad_none)

    def _renamed(self, group: Mapping[str, Any]) -> dict[str, Any]:
        if "decoupled_weight_decay" not in group:
            return {}
        return {"adam_w_mode": group["decoupled_weight_decay"]}
