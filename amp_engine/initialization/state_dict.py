"""Exact FP32 weights in `model.state_dict()`.

The model hooks are on every module. They are plain functions without state: a model pickles and deepcopies
with them, and a copy, whose parameters have no masters, saves its own values. A module that joins later gets
the hooks when it joins, or else when the module around it is saved or loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from amp_engine.casting.forward_casts import cast_joining
from amp_engine.errors import AmpStateError
from amp_engine.ground.distributed import is_sharded
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.initialization import as_it_came
from amp_engine.stepping.beside import Master
from amp_engine.stepping.exact import exact_of, exact_value
from amp_engine.stepping.rows import make_for_joined

# Module of a model with masters -> masters of its parameters that a checkpoint gave before an optimizer did, by name.
_LOADED: weakref.WeakKeyDictionary[nn.Module, dict[str, Master]] = weakref.WeakKeyDictionary()

# State dictionary -> memory of a tensor in it -> its first name there.
_FIRST_NAMES: Any = WeakIdKeyDictionary()


def hook_model(model: nn.Module, has_masters: bool) -> Iterator[RemovableHandle]:
    """Make `model` and each of its modules save and load float32 weights, also modules that join it.

    Yields handles that remove the hooks, except those on modules that joined; one by one, for callers that an interrupt
    makes undo them.

    Args:
        has_masters: True to keep float32 values that are loaded before an optimizer steps the parameters.
    """
    for module in model.modules():
        yield from _hook(module)
        if has_masters:
            _LOADED.setdefault(module, {})
    yield _Joining(model)


class _Joining(RemovableHandle):
    """Keeps the hook for modules that join, while its model lives, until it is removed.

    All models have one hook, which stays when they are collected: graphs that torch.compile made guard its number.
    """

    _all: ClassVar[weakref.WeakSet[_Joining]] = weakref.WeakSet()  # each is kept by the object that removes it
    _hook: ClassVar[RemovableHandle | None] = None

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        _Joining._all.add(self)
        if _Joining._hook is None:
            _Joining._hook = register_module_module_registration_hook(hook_joining)

    def remove(self) -> None:
        """Let the model go."""
        _Joining._all.discard(self)
        remove_joining_hook()


def remove_joining_hook() -> None:
    """Remove the hook for modules that join if there is no model."""
    if _Joining._hook is not None and all(one._model() is None for one in _Joining._all):
        _Joining._hook.remove()
        _Joining._hook = None


def _hook(module: nn.Module) -> Iterator[RemovableHandle]:
    if not _is_hooked(module):
        as_it_came.note(module)
    yield module.register_state_dict_pre_hook(hook_children)
    yield module.register_state_dict_post_hook(save_float32)
    yield module.register_load_state_dict_pre_hook(keep_incoming)
    yield module.register_load_state_dict_post_hook(fill_masters)


def hook_joining(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Module registration hook of all modules: give a module that joins a hooked one the hooks and casts of a part."""
    if isinstance(child, nn.Module) and _is_hooked(module):
        cast_joining(child, module)
        for one in child.modules():
            _hook_if_new(one, module)


def hook_children(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """State-dict pre-hook: add hooks to modules that were put into `module._modules`, as `ModuleList.insert` does."""
    for child in module._modules.values():
        if child is not None:
            _hook_if_new(child, module)


def _hook_if_new(module: nn.Module, parent: nn.Module) -> None:
    if not _is_hooked(module) and not isinstance(module, torch.jit.ScriptModule):
        list(_hook(module))
        if parent in _LOADED:
            _LOADED.setdefault(module, {})


def forget_types(model: nn.Module) -> None:
    """Forget of each module that has no hooks any more which of its tensors came in half."""
    for module in model.modules():
        if not _is_hooked(module):
            as_it_came.forget(module)
            _LOADED.pop(module, None)


def hold_loaded_no_longer(model: nn.Module) -> None:
    """Let go of masters that a checkpoint gave: from here on the caller holds them."""
    for module in model.modules():
        if loaded := _LOADED.get(module):
            loaded.clear()


def _is_hooked(module: nn.Module) -> bool:
    return any(hook is save_float32 for hook in module._state_dict_hooks.values())


def save_float32(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """State-dict post-hook: low-precision entries become FP32 copies, exact if there is a master; tied ones share one.

    What has no master, and the type in which it came, stays as it is. With `keep_vars=True` the entries are the
    parameters themselves, and stay.
    """
    del local_metadata
    came = as_it_came.came_in(module)
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        saved = state_dict.get(prefix + name)
        if tensor is None or not isinstance(saved, Tensor) or saved is tensor:
            continue
        param = tensor if isinstance(tensor, nn.Parameter) and next(exact_of(tensor), None) is not None else None
        is_float = param is not None and saved.dtype is torch.float32  # rounded, after model.float()
        if not (is_float or is_low_precision(saved)) or (param is None and came.get(name) is tensor.dtype):
            continue
        value_f32 = None if param is None else exact_value(param)
        state_dict[prefix + name] = _one_if_tied(
            state_dict, prefix + name, tensor, saved.float() if value_f32 is None else value_f32
        )


def _one_if_tied(state_dict: dict[str, Any], name: str, tensor: Tensor, value_f32: Tensor) -> Tensor:
    """Return the entry of an earlier name for the same memory if their values are equal, else `value_f32`."""
    try:
        names: dict[Hashable, str] = _FIRST_NAMES.setdefault(state_dict, {})
    except TypeError:  # a plain dict cannot be weakly referenced; torch makes an OrderedDict
        return value_f32
    earlier = state_dict.get(names.setdefault(memory_of(tensor), name))
    is_one = (
        earlier is not tensor
        and isinstance(earlier, Tensor)
        and (earlier.dtype, earlier.shape, earlier.device) == (value_f32.dtype, value_f32.shape, value_f32.device)
        and (earlier.is_meta or _same_values(earlier, value_f32))
    )
    return earlier if is_one else value_f32  # type: ignore[return-value]


def keep_incoming(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *torch_reports: Any,
) -> None:
    """Load pre-hook: note where the values of parameters with masters come from, which torch will round.

    A half parameter that no optimizer has stepped yet gets its master here, if its value is float32.

    Raises AmpStateError for `load_state_dict(..., assign=True)` where there are masters.
    """
    del torch_reports
    hook_children(module, prefix, False)
    assigns = local_metadata.get("assign_to_params_buffers")
    params = module._parameters.values()
    if any(p is not None and is_low_precision(p) and next(exact_of(p), None) is None for p in params):
        make_for_joined()
    for name, param in module._parameters.items():
        if param is None:
            continue
        if module in _LOADED and not assigns and _needs_master(param, state_dict.get(prefix + name)):
            _LOADED[module][name] = Master(param, None)
        for keeper in exact_of(param):
            if assigns:
                raise AmpStateError(
                    "load_state_dict(assign=True) would replace the parameters that the optimizer's FP32 masters "
                    "belong to.  Use load_state_dict(state_dict), or load before amp.initialize()."
                )
            keeper.expect(state_dict, prefix + name)


def _needs_master(param: nn.Parameter, value: Any) -> bool:
    """True if `param`, which nothing lies beside, would have a rounded `value` after torch has loaded it."""
    is_half = is_low_precision(param) and param.requires_grad and not (is_sharded(param) or param.is_meta)
    is_wide = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
    return is_half and is_wide and value.shape == param.shape and next(exact_of(param), None) is None


def fill_masters(module: nn.Module, incompatible_keys: Any) -> None:
    """Load post-hook: give masters the unrounded values of the parameters that torch has loaded."""
    del incompatible_keys
    for param in module._parameters.values():
        if param is None:
            continue
        for keeper in exact_of(param):
            value = keeper.pop_expected()
            # Not if torch refused the value (for its shape, say) and will raise, or if a module changed it.
            if value is not None and value.shape == param.shape and _same_values(value.to(param), param):
                keeper.take(value)


def memory_of(tensor: Tensor) -> Hashable:
    """A key that is equal for two tensors with the same view of the same storage."""
    if is_sharded(tensor) or tensor.layout is not torch.strided:
        return id(tensor)
    # Not data_ptr(), which counts as a write and copies copy-on-write memory.
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _same_values(a: Tensor, b: Tensor) -> bool:
    """True if two tensors of one type have the same values; NaN equals NaN. Waits for the device."""
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True).all())
