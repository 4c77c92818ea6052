"""FusedSGD: SGD with momentum in one pass."""

from __future__ import annotations

from torch.optim.optimizer import required

from amp_engine.errors import AmpValueError
from amp_engine.kernels.formulas import Sgd
from amp_engine.optimizers.base import FusedOptimizer, Params, check_not_negative
from amp_engine.optimizers.rules import Rule, hyperparameters


class FusedSGD(FusedOptimizer):
    """SGD with momentum; on float32 the same bits as torch.optim.SGD (its loop and foreach, not its fused variant).

    State per parameter: `momentum_buffer`, like torch.optim.SGD's. A tensor's buffer starts at the first gradient of
    that tensor.

    Args:
        params: parameters or groups.
        lr: learning rate, required here or in each group.
        momentum: 0 keeps no buffer.
        dampening: each gradient but the first enters the buffer times 1 - dampening.
        weight_decay: `weight_decay * weight` is added to the gradient.
        nesterov: Nesterov's variant; needs momentum without dampening.
        wd_after_momentum: add the weight decay after the momentum.
        materialize_master_grads: accepted; under `amp.initialize` a master's gradient is made when it is read.
        set_grad_none: default of `set_to_none` in `zero_grad`.

    Raises AmpValueError for values out of range.
    """

    rule = Rule(
        "sgd",
        "momentum_buffer",
        None,
        hyperparameters(Sgd, decay_after_momentum="wd_after_momentum"),
        keeps_step=False,
        needs_state1=lambda group: group["momentum"] != 0,
    )
    settings = ("set_grad_none", "materialize_master_grads", "wd_after_momentum")

    def __init__(
        self,
        params: Params,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if lr is None:
            raise AmpValueError("FusedSGD needs a learning rate, lr=None is none.  Use for example lr=0.1.")
        if lr is not required:
            check_not_negative(lr=lr)
        check_not_negative(momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise AmpValueError(
                f"Nesterov momentum requires a momentum and zero dampening, not momentum={momentum!r}, "
                f"dampening={dampening!r}."
            )
        self.materialize_master_grads = materialize_master_grads
        self.wd_after_momentum = wd_after_momentum
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "wd_after_momentum": wd_after_momentum,
        }
        super().__init__(params, defaults, set_grad_none)
