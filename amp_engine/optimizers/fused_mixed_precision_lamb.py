"""FusedMixedPrecisionLamb: LAMB for half parameters, with masters of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_engine.errors import AmpTypeError
from amp_engine.optimizers.base import Params, check_not_negative
from amp_engine.optimizers.fused_lamb import FusedLAMB


class FusedMixedPrecisionLamb(FusedLAMB):
    """FusedLAMB that keeps float32 masters of half parameters itself, for use without `amp.initialize`.

    Made for torch.amp.GradScaler and CUDA graphs: the host decides nothing in a step. Each group's `lr` is a float32
    tensor of shape [] on the device of its parameters, which LR schedulers fill; the step counts are on that device
    too. State per parameter: `step`, `exp_avg`, `exp_avg_sq`, and for half parameters `master_param`, all float32.
    Under `amp.initialize` it steps like FusedLAMB.

    Args:
        params: parameters or groups.
        lr: learning rate; a number, or a float32 tensor of shape [], which is copied.
        step: number of steps that the parameters have had.
        bias_correction: divide the moments by 1 - beta^t.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: factor of the weight decay. If it is 0, tensors are not scaled without `use_nvlamb`.
        amsgrad: refused, as in apex.
        adam_w_mode: decoupled weight decay; False adds it to the gradient.
        grad_averaging: let the gradient enter the first moment times 1 - beta1, not times 1.
        max_grad_norm: clip the gradients to this 2-norm; 0: do not clip. A group's own value applies to its tensors.
        use_nvlamb: scale tensors without weight decay too.
        reduced_precision_dtype: only None: the parameters' own types say which are half.
        set_grad_none: default of `set_to_none` in `zero_grad`.

    Raises AmpStateError for `amsgrad`, AmpTypeError for `reduced_precision_dtype`, AmpValueError for values out of
    range.
    """

    master_weights = True
    # torch.amp.GradScaler then sets `grad_scale` and `found_inf` during a step, instead of unscaling and waiting for
    # the device. Other optimizers leave it off by default: FSDP's ShardedGradScaler keeps `found_inf` local to a rank.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        step: int | Tensor = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: None = None,
        set_grad_none: bool = True,
    ) -> None:
        if reduced_precision_dtype is not None:
            raise AmpTypeError(
                f"FusedMixedPrecisionLamb got reduced_precision_dtype={reduced_precision_dtype!r}, but takes the "
                "parameters in the type that they have.  Call model.to(dtype) before building it, and leave this out."
            )
        check_not_negative(step=step)
        super().__init__(
            params,
            lr,  # type: ignore[arg-type]  # a tensor in each group, which the kernels read on its device
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            set_grad_none,
            max_grad_norm,
            use_nvlamb,
        )
        if not (isinstance(step, int) and step == 0):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and copy its `lr` into a float32 tensor of shape [] on the device of its parameters."""
        super().add_param_group(param_group)
        _put_lr_on_device(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class, FusedLAMB or apex's class saved; see FusedOptimizer."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            _put_lr_on_device(group)


def _put_lr_on_device(group: dict[str, Any]) -> None:
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    group["lr"] = torch.as_tensor(group["lr"]).detach().to(device, torch.float32, copy=True)
