"""Casts a model by hand, and copies gradients and values between its parameters and FP32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine.apex.apex_C import flatten, unflatten
from amp_engine.errors import AmpStateError
from amp_engine.ground.torch_private import BatchNormBase

clip_grad_norm = nn.utils.clip_grad_norm_


class tofp16(nn.Module):  # noqa: N801 - apex's name
    """A module that casts its input to float16."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input.half()`."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802 - apex's name
    """Cast the affine batch norms in `module` to float32, in place, and return `module`."""
    for part in module.modules():
        if _is_affine_batch_norm(part):
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Cast `network` to float16 in place, except affine batch norms, and put a cast of the input in front of it."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


@torch.no_grad()
def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters, their gradients and the floating buffers of `module`, without its children.

    Parameters and buffers stay the same objects.
    """
    for param in module.parameters(recurse=False):
        if param.is_floating_point() and param.dtype != dtype:
            # torch requires that a gradient has its parameter's type, so it is detached while both change.
            grad, param.grad = param.grad, None
            param.data = param.data.to(dtype)
            if grad is not None:
                grad.data = grad.data.to(dtype)
                param.grad = grad
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Apply `convert_module` to every module in `network` except affine batch norms, and return `network`."""
    for module in network.modules():
        if not _is_affine_batch_norm(module):
            convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN needs its weights in one chunk again
    return network


class FP16Model(nn.Module):
    """`network` in float16 except affine batch norms; positional inputs are cast to float16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Tensor) -> Any:
        """Return `network(*inputs)` for inputs cast to float16."""
        return self.network(*(input.half() for input in inputs))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of `model` that require gradients, and float32 copies of them as masters.

    Args:
        flat_master: one master for all, 1-d, with a `.grad` of zeros.

    Raises AmpStateError with `flat_master` for parameters of several types or devices, or none.
    """
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return model_params, [nn.Parameter(param.detach().to(torch.float32, copy=True)) for param in model_params]
    kinds = {(param.dtype, param.device) for param in model_params}
    if len(kinds) != 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none"
        raise AmpStateError(
            f"prep_param_lists: with flat_master=True all parameters must be of one type and on one device, but the "
            f"model has {found}.  Use flat_master=False, or make the model one type (model.half())."
        )
    master = nn.Parameter(flatten([param.detach() for param in model_params]).float())
    master.grad = torch.zeros_like(master)
    return model_params, [master]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of `model_params` into those of `master_params`, and allocate missing ones.

    A model parameter without a gradient leaves its master without one; a flat master has zeros there.
    """
    if flat_master:
        (master,) = master_params
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        for param, view in zip(model_params, unflatten(master.grad, model_params), strict=True):
            view.zero_() if param.grad is None else view.copy_(param.grad)
        return
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = param.grad.to(master.dtype, copy=True)
        else:
            master.grad.copy_(param.grad)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters into the model's parameters, rounded to their type."""
    if flat_master:
        (master,) = master_params
        master_params = unflatten(master.detach(), model_params)
    if len(model_params) != len(master_params):
        raise AmpStateError(
            f"master_params_to_model_params: {len(model_params)} model parameters, but {len(master_params)} masters.  "
            "Pass both lists as prep_param_lists returned them."
        )
    if model_params:
        torch._foreach_copy_(list(model_params), list(master_params))


def to_python_float(t: Any) -> float:
    """Return the number in a tensor of one element, or the first element of a sequence. Waits for the device."""
    number: float = t.item() if hasattr(t, "item") else t[0]
    return number


def _is_affine_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BatchNormBase) and module.affine
