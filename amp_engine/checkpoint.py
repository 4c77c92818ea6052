"""What is saved: exact FP32 weights through `model.state_dict()`, loss scalers through `amp.state_dict()`.

The model hooks sit on every module, hold nothing, and are plain functions: a model pickles and deepcopies
with them, and a copy, whose parameters have no masters, saves its own values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amp_engine.dtypes import is_low_precision
from amp_engine.errors import AmpStateError, AmpTypeError
from amp_engine.levels import LEVELS
from amp_engine.scaler import LossScaler
from amp_engine.stepping.master import exact_value, masters_of

SCHEMA_VERSION = 1
_SCALER_KEY = "loss_scaler"


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
        for master in masters_of(param):
            if local_metadata.get("assign_to_params_buffers"):
                raise AmpStateError(
                    "load_state_dict(assign=True) would replace the parameters that the optimizer's FP32 masters "
                    "belong to.  Use load_state_dict(state_dict), or load before amp.initialize()."
                )
            value = state_dict.get(prefix + name)
            master.incoming = value if isinstance(value, Tensor) else None


def fill_masters(module: nn.Module, incompatible_keys: Any) -> None:
    """Load post-hook: give masters the unrounded values of those parameters that torch did load."""
    del incompatible_keys
    for param in module._parameters.values():
        if param is None:
            continue
        for master in masters_of(param):
            value, master.incoming = master.incoming, None
            # Not so if torch refused the value (its shape, say) and will raise, or a module made it another.
            if value is not None and value.shape == param.shape and _same_values(value.to(param), param):
                master.weight.detach().copy_(value)
                master.mark_in_sync()


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one type have the same values; a NaN is one. Waits for the device."""
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True).all())


def pack_scalers(
    scalers: Sequence[LossScaler],
    opt_level: str | None,
    destination: OrderedDict[str, Any] | None = None,
) -> OrderedDict[str, Any]:
    """apex's `{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}`.

    Schema version, level and which scalers are dynamic travel as the dictionary's `_metadata` attribute, where torch's
    own state dictionaries carry theirs: they survive torch.save, and code that walks the entries meets scalers only.
    Waits for the device once a dynamic scaler.
    """
    packed = OrderedDict() if destination is None else destination
    for i, scaler in enumerate(scalers):
        packed[f"{_SCALER_KEY}{i}"] = scaler.state_dict()
    if isinstance(packed, OrderedDict):  # a plain dict, as destination, has no attributes
        packed._metadata = {  # type: ignore[attr-defined]
            "version": SCHEMA_VERSION,
            "opt_level": opt_level,
            "dynamic": [scaler.dynamic for scaler in scalers],
        }
    return packed


def unpack_scalers(scalers: Sequence[LossScaler], state_dict: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Load what `pack_scalers`, or apex, wrote: by name where the names are ours, else by order.

    A static scaler takes no scale that is known to be of a dynamic one, nor the other way: it stays as it is. apex's
    dictionaries do not say, so what they hold is taken, as apex does.

    Entries without a scaler and scalers without an entry are reported through `say`. Raises AmpStateError
    for keys that are no loss scaler's, after the others were loaded; AmpTypeError for what is no dictionary
    and AmpValueError for a malformed entry, before anything is.
    """
    if not isinstance(state_dict, Mapping):
        raise AmpTypeError(
            f"amp.load_state_dict() takes what amp.state_dict() returned, not a {type(state_dict).__name__}."
        )
    entries = {key: value for key, value in state_dict.items() if _SCALER_KEY in str(key)}
    unexpected = [str(key) for key in state_dict if key not in entries]
    if len(state_dict) != len(scalers):
        say(f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used")
    loadable = []
    for index, value in _by_name_or_order(entries):
        if index >= len(scalers):
            say(f"Skipping loss_scaler[{index}], since num_losses was set to {len(scalers)}")
            break
        LossScaler("dynamic").load_state_dict(value)  # raises before a scaler of the run is touched
        scaler, was_dynamic = scalers[index], _was_dynamic(state_dict, index, value)
        if was_dynamic not in (None, scaler.dynamic):
            kinds = ("dynamic", "a static scale") if was_dynamic else ("static", "a dynamic scale")
            say(f"loss_scaler{index} was saved from a {kinds[0]} loss scale: {kinds[1]} stays as it is")
            continue
        if was_dynamic is None and not scaler.dynamic and float(value["loss_scale"]) != scaler.loss_scale():
            say(
                f"Warning: loss_scaler{index} has a static scale of {scaler.loss_scale()}, and takes the saved "
                f"{float(value['loss_scale'])}: the state_dict does not say whether that was dynamic"
            )
        loadable.append((scaler, value))
    for scaler, value in loadable:
        scaler.load_state_dict(value)
    if unexpected:
        keys = ", ".join(f'"{key}"' for key in unexpected)
        raise AmpStateError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}. ")


def _was_dynamic(state_dict: Mapping[str, Any], index: int, entry: Mapping[str, Any]) -> bool | None:
    """Whether an entry is of a dynamic scaler; None if the dictionary does not say, as one of apex."""
    metadata = getattr(state_dict, "_metadata", None)
    if not isinstance(metadata, dict):
        return None
    dynamic = metadata.get("dynamic")
    if isinstance(dynamic, list):
        return bool(dynamic[index]) if index < len(dynamic) else None
    level = LEVELS.get(
        str(metadata.get("opt_level"))
    )  # before 0.2: by what the level does unless it was told otherwise
    if level is None:
        return None
    if level.loss_scale == "dynamic":
        return True
    return False if float(entry["loss_scale"]) == level.loss_scale else None


def _by_name_or_order(entries: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """(index of the scaler, entry), lowest index first."""
    names = [str(key).removeprefix(_SCALER_KEY) for key in entries]
    if all(name.isdecimal() for name in names) and len(set(names)) == len(names):
        return sorted(zip(map(int, names), entries.values(), strict=True), key=itemgetter(0))
    return list(enumerate(entries.values()))


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor
