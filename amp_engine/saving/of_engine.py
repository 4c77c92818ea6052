"""What an engine saves and loads."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.levels.policy import Policy
from amp_engine.levels.report import Reporter
from amp_engine.optimizers import LARC
from amp_engine.saving import by_name, checkpoint_file, scaler_state
from amp_engine.saving.by_name import TrainingState
from amp_engine.saving.scaler_state import ScalerFormat
from amp_engine.scaling.scaler import LossScaler


class Saving:
    """The part of an Engine that concerns checkpoints.

    Being `Stateful`, it goes into a dictionary that torch.distributed.checkpoint saves.
    """

    policy: Policy | None
    reporter: Reporter

    @property
    def scalers(self) -> list[LossScaler]:
        """One for each loss_id."""
        raise NotImplementedError

    def state_dict(
        self, destination: OrderedDict[str, Any] | None = None, *, format: ScalerFormat = "amp"
    ) -> OrderedDict[str, Any]:
        """`{"loss_scaler0": {"loss_scale": float, "unskipped": int, "dynamic": bool, ...}, ...}`; empty if not enabled.

        Waits for the device once a dynamic scaler. Masters are saved by `model.state_dict()`. `format` "apex" leaves
        two numbers an entry; "torch" is for one GradScaler, see `amp.convert_state_dict`.
        """
        policy = self._initialized_policy("state_dict")
        return scaler_state.pack_scalers(self.scalers, policy.opt_level, destination, format)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the loss scalers from what `state_dict`, apex or a GradScaler wrote, at this level or another.

        Static scales stay; dynamic ones go on from dynamic ones, and else start at the first scale.
        Raises AmpStateError for keys that are no loss scaler's, after loading the others.
        """
        self._initialized_policy("load_state_dict")
        scaler_state.unpack_scalers(self.scalers, state_dict, lambda text: self.reporter.say(text, rank0=True))

    def named_masters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """As the function `amp.named_masters`."""
        return by_name.named_masters(model)

    def export_state_dict(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> OrderedDict[str, Any]:
        """As the function `amp.export_state_dict`."""
        return by_name.export_state_dict(model, dtype)

    def optimizer_state_dict(
        self, model: nn.Module, optimizer: Optimizer | LARC | Sequence[Optimizer | LARC]
    ) -> dict[str, Any]:
        """As the function `amp.optimizer_state_dict`."""
        return by_name.optimizer_state_dict(model, optimizer)

    def load_optimizer_state_dict(
        self, model: nn.Module, optimizer: Optimizer | LARC | Sequence[Optimizer | LARC], state_dict: Mapping[str, Any]
    ) -> None:
        """As the function `amp.load_optimizer_state_dict`."""
        by_name.load_optimizer_state_dict(model, optimizer, state_dict)

    def training_state(
        self, model: nn.Module, optimizer: Optimizer | LARC | Sequence[Optimizer | LARC]
    ) -> TrainingState:
        """Model, optimizers and loss scalers as one object for torch.distributed.checkpoint.

            dcp.save({"training": amp.training_state(model, optimizer)}, checkpoint_id=folder)
            dcp.load({"training": amp.training_state(model, optimizer)}, checkpoint_id=folder)

        FP32 weights, and the optimizers' state by the names of parameters. Save each checkpoint to a folder of its own:
        a save that is interrupted leaves neither the old one nor the new.
        """
        self._initialized_policy("training_state")
        return TrainingState(model, optimizer, self)

    def save(self, path: str | os.PathLike[str], /, **objects: Any) -> None:
        """Write a checkpoint that is whole or not there, whatever happens meanwhile; of several ranks, call it on one.

            amp.save(path, model=model, optimizer=optimizer, scheduler=scheduler, epoch=epoch)

        Of an object that has `state_dict` that is saved, in lists, tuples and dictionaries too; other values as they
        are. The loss scalers come with it, as "amp". torch.load(path) gives the dictionary.

        The bytes go to a file beside `path`, to the disk, and then take its name; their SHA-256 stands at the end.

        Raises AmpValueError for an object named "amp", AmpTypeError for what torch.load(weights_only=True) would not
        load, and OSError of the operating system, which says when the disk is full, with the file that was there as it
        was. Waits for the device.
        """
        if "amp" in objects:
            raise AmpValueError('amp.save() writes "amp", the loss scalers, itself.  Choose another name.')
        state = {name: _state_of(value) for name, value in objects.items()}
        if self.policy is not None:
            state["amp"] = self.state_dict()
        checkpoint_file.write_file(path, state)

    def load(self, path: str | os.PathLike[str], /, *, map_location: Any = "cpu", **objects: Any) -> dict[str, Any]:
        """Load what `save` wrote into objects, all of them or none, and the loss scalers if `initialize` was called.

            rest = amp.load(path, model=model, optimizer=optimizer, scheduler=scheduler)
            epoch = rest["epoch"]

        Args:
            path: the file; nothing in it is executed.
            map_location: where tensors are loaded to before they are copied, as in torch.load.
            objects: under the names that they were saved with; lists and dictionaries of them as they were.

        Returns:
            What was saved and not loaded into an object: values, and states for which none was given.

        Raises AmpFileError if the file is damaged, with what was expected and what was found, and AmpStateError,
        AmpTypeError or AmpValueError for what does not fit; then everything is as it was, for which the host holds a
        copy of it meanwhile. Waits for the device.
        """
        saved = checkpoint_file.read_file(path, map_location)
        if self.policy is not None and "amp" in saved:
            objects = {**objects, "amp": self}
        missing = [name for name in objects if name not in saved]
        if missing:
            raise AmpValueError(
                f"{os.fspath(path)} has no {', '.join(map(repr, missing))}.  It has {', '.join(map(repr, saved))}."
            )
        pairs = [pair for name, value in objects.items() for pair in _pairs(name, value, saved[name])]
        _load_all_or_none(pairs, os.fspath(path))
        return {name: value for name, value in saved.items() if name not in objects}

    def _initialized_policy(self, call: str) -> Policy:
        if self.policy is None:
            raise AmpStateError(
                f"amp.{call}() was called before amp.initialize(), so there are no loss scalers.  Call "
                "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
            )
        return self.policy


def _state_of(value: Any) -> Any:
    """What is saved of an argument of `save`."""
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    if type(value) in (list, tuple):
        return type(value)(_state_of(item) for item in value)
    if type(value) is dict:
        return {key: _state_of(item) for key, item in value.items()}
    return value


def _pairs(name: str, target: Any, state: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, object, its state) for what is in `target`, an argument of `load`."""
    if callable(getattr(target, "load_state_dict", None)):
        yield name, target, state
        return
    if type(target) not in (list, tuple, dict):
        raise AmpTypeError(
            f"{name} is a {type(target).__name__}, which has no load_state_dict.  Leave it out: amp.load returns it."
        )
    keys = list(target) if isinstance(target, dict) else list(range(len(target)))
    # Of 0.1.0 a tuple came back as a list.
    saved = (
        list(state) if isinstance(state, dict) else list(range(len(state))) if type(state) in (list, tuple) else None
    )
    if saved != keys:
        found = "no such container" if saved is None else saved
        raise AmpValueError(f"{name} is to be loaded into {keys}, and saved was {found}.")
    for key in keys:
        yield from _pairs(f"{name}[{key!r}]", target[key], state[key])


def _load_all_or_none(pairs: Sequence[tuple[str, Any, Any]], path: str) -> None:
    """Call `load_state_dict` of each; if one raises, put back those that were loaded. Raises AmpStateError."""
    before: list[tuple[str, Any, Any]] = []
    try:
        for name, target, state in pairs:
            before.append((name, target, _on_host(target.state_dict())))
            target.load_state_dict(state)
    except BaseException as e:
        for _, target, state in reversed(before):
            target.load_state_dict(state)
        if not isinstance(e, Exception):
            raise
        raise AmpStateError(f"{path} does not fit, and nothing of it was loaded.  {before[-1][0]}: {e}") from e


def _on_host(state: Any) -> Any:
    """A copy of a state dictionary, its tensors on the CPU."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        copied = copy.copy(state)  # with the versions of modules, which are an attribute
        copied.update((key, _on_host(value)) for key, value in state.items())
        return copied
    if type(state) in (list, tuple):
        return type(state)(_on_host(item) for item in state)
    return copy.deepcopy(state)
