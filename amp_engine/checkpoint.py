"""What is saved of a model: exact FP32 weights, through `model.state_dict()`.

The model hooks sit on every module, hold nothing, and are plain functions: a model pickles and deepcopies
with them, and a copy, whose parameters have no masters, saves its own values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amp_engine.distributed import is_sharded
from amp_engine.dtypes import is_low_precision
from amp_engine.errors import AmpStateError
from amp_engine.stepping.exact import exact_of, exact_value


def hook_model(model: nn.Module) -> list[RemovableHandle]:
    """Make `model` and each of its modules save and load float32 weights. Returns the way back."""
    handles: list[RemovableHandle] = []
    for module in model.modules():
        handles += [
            module.register_state_dict_post_hook(save_float32),
            module.register_load_state_dict_pre_hook(keep_incoming),
            module.register_load_state_dict_post_hook(fill_masters),
        ]
    return handles


def save_float32(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """State-dict post-hook: low-precision entries become float32 copies, exact where a master is.

    With `keep_vars=True` the entries are the parameters themselves, and stay.
    """
    del local_metadata
    for name, tensor in _own_tensors(module):
        saved = state_dict.get(prefix + name)
        if not isinstance(saved, Tensor) or saved is tensor or not is_low_precision(saved):
            continue
        value_f32 = exact_value(tensor) if isinstance(tensor, nn.Parameter) else None
        state_dict[prefix + name] = saved.float() if value_f32 is None else value_f32.clone()


def keep_incoming(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *torch_reports: Any,
) -> None:
    """Load pre-hook: note what arrives for parameters with masters, before torch rounds it into them.

    Raises AmpStateError for `load_state_dict(..., assign=True)`.
    """
    del torch_reports
    for name, param in module._parameters.items():
        if param is None:
            continue
        for keeper in exact_of(param):
            if local_metadata.get("assign_to_params_buffers"):
                raise AmpStateError(
                    "load_state_dict(assign=True) would replace the parameters that the optimizer's FP32 masters "
                    "belong to.  Use load_state_dict(state_dict), or load before amp.initialize()."
                )
            value = state_dict.get(prefix + name)
            keeper.incoming = value if isinstance(value, Tensor) else None


def fill_masters(module: nn.Module, incompatible_keys: Any) -> None:
    """Load post-hook: give masters the unrounded values of those parameters that torch did load."""
    del incompatible_keys
    for param in module._parameters.values():
        if param is None:
            continue
        for keeper in exact_of(param):
            value, keeper.incoming = keeper.incoming, None
            # Not so if torch refused the value (its shape, say) and will raise, or a module made it another.
            if value is not None and value.shape == param.shape and _same_values(value.to(param), param):
                keeper.take(value)


def memory_of(tensor: Tensor) -> Hashable:
    """The same of two tensors that see the same memory alike."""
    if is_sharded(tensor) or tensor.layout is not torch.strided:
        return id(tensor)
    # Not by data_ptr(), which tells copy-on-write memory that a writer has come.
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one type have the same values; a NaN is one. Waits for the device."""
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True).all())


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor
