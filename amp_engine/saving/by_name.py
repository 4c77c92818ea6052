"""Weights, masters and the state of a training run, by the names of the model's parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

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
        The entries of `model.state_dict()` as contiguous copies on their devices, or where the masters are; tied
        weights are one tensor. Entries that are no tensors are unchanged.

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


class TrainingState:
    """Model, optimizers and loss scalers as one `Stateful` of torch.distributed.checkpoint, by names.

    torch's `get_state_dict` and its kin do it: a step of zeros at a learning rate of 0 begins the state of an optimizer
    that has none.

    Args:
        model: its FP32 weights are saved.
        optimizer: the optimizers that step `model`, one or several.
        scalers: an Engine, which has the loss scales.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | LARC | Sequence[Optimizer | LARC], scalers: Any
    ) -> None:
        listed = as_optimizers(list(optimizer) if isinstance(optimizer, tuple) else optimizer)
        self._model, self._optimizers, self._scalers = model, [inner_of(one) for one in listed], scalers

    def state_dict(self) -> dict[str, Any]:
        """Return `{"model": ..., "optimizer": ..., "amp": ...}`. Waits for the device.

        Raises AmpStateError if two optimizers step one parameter: torch would save the state of the second alone; and
        for state under a key that is no parameter, which has no name.
        """
        from torch.distributed.checkpoint import state_dict as torchs  # slow to import

        stepped = [id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]]
        if len(set(stepped)) < len(stepped):
            raise AmpStateError(
                "Two of the optimizers given to amp.training_state() step one parameter, whose name does not tell of "
                "which the state is.  Call amp.training_state(model, optimizer) for each of them."
            )
        for one in self._optimizers:
            for key in one.state:
                if not isinstance(key, Tensor):
                    raise AmpStateError(
                        f"{type(one).__name__}.state has an entry under {key!r}, which is no parameter and has no name "
                        "in the model.  Save optimizer.state_dict() in place of amp.training_state(model, optimizer), "
                        "or keep it in an attribute of the optimizer."
                    )
        # First, as masters of an optimizer that was made after `initialize` begin with its step of zeros.
        state = torchs.get_optimizer_state_dict(self._model, self._optimizers)
        weights = torchs.get_model_state_dict(self._model)
        return {"model": weights, "optimizer": state, "amp": self._scalers.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`. Raises the errors of its parts."""
        from torch.distributed.checkpoint import state_dict as torchs

        torchs.set_model_state_dict(self._model, state_dict["model"])
        # Not strict: a parameter without a gradient so far has no state.
        options = torchs.StateDictOptions(strict=False)
        torchs.set_optimizer_state_dict(self._model, self._optimizers, state_dict["optimizer"], options=options)
        self._scalers.load_state_dict(state_dict["amp"])


def _plain(name: str) -> str:
    for part in _OF_WRAPPERS:
        name = name.replace(part, "")
    return name
