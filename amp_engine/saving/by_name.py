"""Weights, masters and the states of optimizers, by the names of the model's parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from amp_engine.casting.regions import float_region
from amp_engine.errors import AmpStateError, AmpTypeError
from amp_engine.ground.distributed import without_wrapper
from amp_engine.ground.dtypes import is_low_precision, parse_dtype
from amp_engine.ground.torch_private import COMPILED
from amp_engine.initialization.arguments import as_optimizers
from amp_engine.initialization.as_it_came import tensors_in_half
from amp_engine.initialization.state_dict import memory_of
from amp_engine.optimizers import LARC, inner_of
from amp_engine.stepping.beside import masters_of, rounds_to_params
from amp_engine.stepping.exact import exact_of, exact_value, float32_of
from amp_engine.stepping.step import ghost_of, unhooked_step

# torch.compile and activation checkpointing add these to names; torch.distributed.checkpoint removes them, too.
_OF_WRAPPERS = (f"{COMPILED}.", "_checkpoint_wrapped_module.")


def named_masters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, weight) of each parameter of `model`: its master if it has one, else the parameter.

    Names are those of `model.named_parameters()`, without those of DistributedDataParallel, torch.compile and
    activation checkpoints; a shared parameter has its first name. For a split master, and for a master whose parameter
    was written since, through `.data` or otherwise, yields a copy of the value that `model.state_dict()` has.
    Waits for each device once, if there are masters.
    """
    named = [(_plain(name), param) for name, param in without_wrapper(model).named_parameters()]
    masters = {name: master for name, param in named for master in masters_of(param) if master.counts()}
    rounds = dict(zip(masters, rounds_to_params([*masters.values()]), strict=True))
    for name, param in named:
        if rounds.get(name):
            yield name, masters[name].weight
        elif next(exact_of(param), None) is None:
            yield name, param
        else:
            yield name, nn.Parameter(float32_of(param), requires_grad=False)


@torch.no_grad()
def export_state_dict(model: nn.Module, dtype: torch.dtype | str | None = None) -> OrderedDict[str, Any]:
    """Return weights and buffers for other programs: `model.state_dict()` in the types that the model computes in.

        model.save_pretrained(folder, state_dict=amp.export_state_dict(model))  # transformers
        torch.save(amp.export_state_dict(model, torch.bfloat16), path)

    Args:
        model: also before `initialize` and after `close`. For DistributedDataParallel, DataParallel, torch.compile and
            AveragedModel, exports the model inside, by its own names.
            Under FSDP2 and tensor parallelism entries are this rank's shards, in FP32 if `dtype` is None:
            `value.full_tensor()`, called on all ranks, returns the whole tensor.
        dtype: type of all floating entries: torch.float16, torch.bfloat16 or torch.float32, rounded from the exact
            FP32 values; values beyond float16 become infinite. None: what came in half has that type; each other
            entry that of its parameter or buffer, half at O2, O3 and O5 except for what stays FP32.

    Returns:
        The entries of `model.state_dict()` as contiguous copies on their devices; tied weights are one tensor. Entries
        that are no tensors are unchanged.

    Raises AmpTypeError if `model` is no module, or for another dtype. No host sync.
    """
    if not isinstance(model, nn.Module):
        raise AmpTypeError(
            f"export_state_dict() takes a torch.nn.Module, not a {type(model).__name__}.  Call "
            "amp.export_state_dict(model), for each model one."
        )
    target = None if dtype is None else parse_dtype(dtype, "dtype")
    state = _inside(model).state_dict(keep_vars=True)
    came = {id(tensor): dtype for module in model.modules() for tensor, dtype in tensors_in_half(module)}
    copies: dict[Hashable, Tensor] = {}
    exported: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        if isinstance(value, Tensor):
            place = memory_of(value)
            if place not in copies:
                copies[place] = _copied_as(value, came.get(id(value)) if target is None else target)
            value = copies[place]
        exported[_plain(name)] = value
    # torch's versions of modules, for `load_state_dict`.
    versions = getattr(state, "_metadata", {})
    exported._metadata = OrderedDict((_plain(path), noted) for path, noted in versions.items())  # type: ignore[attr-defined]
    return exported


def _copied_as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Copy a tensor, in `dtype` if it is floating and `dtype` is not None; round once, from the exact value."""
    exact = exact_value(tensor) if isinstance(tensor, nn.Parameter) and is_low_precision(tensor) else None
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    copied = (tensor if exact is None else exact).detach().to(kind, copy=True)
    return copied.contiguous() if copied.layout is torch.strided else copied


def _inside(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers that prefix the names of its parameters."""
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel, AveragedModel)):
            model = model.module
        elif isinstance(inner := model._modules.get(COMPILED), nn.Module):
            model = inner
        else:
            return model


def optimizer_state_dict(model: nn.Module, optimizer: Optimizer | LARC | Sequence[Optimizer | LARC]) -> dict[str, Any]:
    """Return `{"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}, ...]}`.

    Names are those of `named_masters`. This is the form of torch's `get_optimizer_state_dict`, which has an optimizer
    without state begin it by a step.

    Raises AmpStateError if an optimizer steps a tensor that is no parameter of `model`, or if several optimizers have
    state that a name alone does not tell apart.
    """
    names, optimizers = _names(model), _each(optimizer)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    stepped: set[str] = set()
    for one in optimizers:
        by_index = _names_of(one, names)
        saved = one.state_dict()
        unclear = [name for name in by_index if name in stepped]
        unclear += [key for key in saved["state"] if not isinstance(key, int)] if len(optimizers) > 1 else []
        if unclear:
            raise AmpStateError(
                f"{unclear[0]!r} does not tell of which of {len(optimizers)} optimizers the state is: two step that "
                "parameter, or it names none.  Call amp.optimizer_state_dict(model, optimizer) for each optimizer."
            )
        stepped.update(by_index)
        state.update((by_index[key] if isinstance(key, int) else key, own) for key, own in saved["state"].items())
        groups += [{**group, "params": [by_index[i] for i in group["params"]]} for group in saved["param_groups"]]
    return {"state": state, "param_groups": groups}


def load_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer | LARC | Sequence[Optimizer | LARC], state_dict: Mapping[str, Any]
) -> None:
    """Load a result of `optimizer_state_dict` or of torch's `get_optimizer_state_dict`, for any order of parameters.

    Raises AmpStateError, before anything is loaded, if a group of an optimizer was not saved with the same parameters,
    or for the flat form of torch's function.
    """
    if "param_groups" not in state_dict:
        raise AmpStateError(
            "load_optimizer_state_dict() takes {'state': ..., 'param_groups': ...}, and there is no 'param_groups'.  "
            "Pass what amp.optimizer_state_dict returned, or torch's get_optimizer_state_dict with "
            "flatten_optimizer_state_dict=False."
        )
    state, saved_groups = state_dict["state"], state_dict["param_groups"]
    names = _names(model)
    of_weights = {name for group in saved_groups for name in group["params"]}
    of_none = {key: value for key, value in state.items() if key not in of_weights}
    packed: list[tuple[Optimizer, dict[str, Any]]] = []
    for one in _each(optimizer):
        indices = {name: index for index, name in enumerate(_names_of(one, names))}
        groups = []
        for group in one.param_groups:
            own = [names[id(weight)] for weight in group["params"]]
            saved = next((g for g in saved_groups if set(g["params"]) == set(own)), None)
            if saved is None:
                raise AmpStateError(
                    f"No group was saved of exactly {', '.join(own) or 'no parameters'}, which a group of this "
                    f"{type(one).__name__} has.  Saved were {[list(g['params']) for g in saved_groups]}."
                )
            groups.append({**saved, "params": [indices[name] for name in own]})
        own_state = {index: state[name] for name, index in indices.items() if name in state}
        packed.append((one, {"state": {**own_state, **of_none}, "param_groups": groups}))
    for one, of_one in packed:
        one.load_state_dict(of_one)


class TrainingState:
    """Model, optimizers and loss scalers as one `Stateful` of torch.distributed.checkpoint, by names.

    torch.distributed.checkpoint loads into existing tensors. So for a weight that has no state yet, since nothing was
    stepped or it never had a gradient, the dictionary has the zeros with which its state will begin, and "begun" lacks
    its name; the optimizer itself gets no state. This needs, for a moment, memory for such weights and their gradients.

    Args:
        model: its FP32 weights are saved.
        optimizer: the optimizers that step `model`, one or a list.
        scalers: an Engine, which has the loss scales.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | LARC | Sequence[Optimizer | LARC], scalers: Any
    ) -> None:
        self._model, self._optimizer, self._scalers = model, optimizer, scalers

    def state_dict(self) -> dict[str, Any]:
        """Return `{"model": ..., "optimizer": ..., "begun": ..., "amp": ...}`. Waits for the device.

        "begun" has the keys of the state that there is.
        """
        by_name, names = optimizer_state_dict(self._model, self._optimizer), _names(self._model)
        begun = [*by_name["state"]]
        for one in _each(self._optimizer):
            of_one = _names_of(one, names)
            by_name["state"].update((of_one[index], state) for index, state in _will_begin(one).items())
        return {
            "model": without_wrapper(self._model).state_dict(),
            "optimizer": by_name,
            "begun": begun,
            "amp": self._scalers.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`. Raises the errors of its parts."""
        saved, begun = state_dict["optimizer"], set(state_dict["begun"])
        state = {key: value for key, value in saved["state"].items() if key in begun}
        load_optimizer_state_dict(self._model, self._optimizer, {**saved, "state": state})
        without_wrapper(self._model).load_state_dict(state_dict["model"])
        self._scalers.load_state_dict(state_dict["amp"])


def _plain(name: str) -> str:
    for part in _OF_WRAPPERS:
        name = name.replace(part, "")
    return name


def _names(model: nn.Module) -> dict[int, str]:
    """Map the id of each parameter, and of its master, to the parameter's name."""
    named = [(_plain(name), param) for name, param in without_wrapper(model).named_parameters()]
    return {id(weight): name for name, p in named for weight in (p, *(m.weight for m in masters_of(p)))}


def _names_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return the name of each weight in the groups of `optimizer`, in their order."""
    for weight in _weights(optimizer):
        if id(weight) not in names:
            raise AmpStateError(
                f"This {type(optimizer).__name__} steps a tensor of shape {tuple(weight.shape)} that is none of the "
                f"model's {len(names)} parameters and masters.  Pass the model that the optimizer was made for."
            )
    return [names[id(weight)] for weight in _weights(optimizer)]


def _each(optimizer: Any) -> list[Optimizer]:
    return [inner_of(one) for one in as_optimizers(list(optimizer) if isinstance(optimizer, tuple) else optimizer)]


def _weights(optimizer: Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _will_begin(optimizer: Optimizer) -> dict[int, Any]:
    """Return the state by index, every value 0, that weights without state would have after a step. Steps copies."""
    indices = [index for index, weight in enumerate(_weights(optimizer)) if weight not in optimizer.state]
    if not indices:
        return {}
    wanted, places, groups = set(indices), count(), list[dict[str, Any]]()
    for own in optimizer.param_groups:
        group = {key: value.clone() if isinstance(value, Tensor) else value for key, value in own.items()}
        group["params"] = [_copy_with_gradient(weight) for weight in own["params"] if next(places) in wanted]
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        groups.append(group)
    double = ghost_of(optimizer, groups)
    try:
        with float_region():
            unhooked_step(optimizer)(double)
    except Exception:
        if len(indices) == len(_weights(optimizer)):
            raise
        return {}  # L-BFGS has all of its state at the first weight, and steps with a closure only
    begun = {i: state for i, state in double.state_dict()["state"].items() if isinstance(i, int)}
    for state in begun.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = torch.zeros_like(value)
    return {indices[i]: state for i, state in begun.items()}


def _copy_with_gradient(weight: Tensor) -> nn.Parameter:
    keeps_float32 = isinstance(weight, nn.Parameter) and next(exact_of(weight), None) is not None
    value = weight.detach().float() if keeps_float32 else weight.detach().clone()
    copy = nn.Parameter(value, requires_grad=weight.requires_grad)
    if weight.requires_grad:
        copy.grad = torch.zeros_like(copy)
    return copy
