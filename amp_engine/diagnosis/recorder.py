"""Follows one batch: the modules that are run, their inputs and outputs, and each operation of the forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amp_engine.diagnosis.post_mortem import Place
from amp_engine.ground.torch_private import DispatchMode, is_in_backward, leaves_of, without_compiled
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.rows import Rows


class Module(NamedTuple):
    """A module: its name in the model, "" for the model itself, and its class."""

    name: str
    type: str | None


class Recorder(DispatchMode):
    """Calls its own methods as a batch is run inside of `following`: `given` and `gave`, and `run`.

    Args:
        models: followed with all modules in them, except modules compiled by torch.jit, which run no hooks.

    Attributes:
        sees_operations: `run` is to be called as well, which costs a call of Python for each operation.
        modules: each module, and its name.
        running: the modules that are being run, the innermost last.
        handles: of hooks on the graph, until `end`.
        is_paused: operations are not looked at.
        was_backward: a backward was seen, or announced by a `scale_loss`.
    """

    sees_operations = False

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.modules = names_of(models)
        self.running: list[Module] = []
        self.handles: list[RemovableHandle] = []
        self.is_paused = False
        self.was_backward = False

    @property
    def innermost(self) -> Module | None:
        """The module that is being run, or None outside of all."""
        return self.running[-1] if self.running else None

    @contextmanager
    def following(self) -> Iterator[None]:
        """While inside, hear of modules, and of operations if `sees_operations`."""
        handles: list[RemovableHandle] = []
        try:
            for module, name in self.modules.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    # Functions, which a copy of a module shares: a bound method would be copied with this.
                    handles += [
                        module.register_forward_pre_hook(
                            lambda _, args, kwargs, name=name: self._enter(name, (args, kwargs)),
                            prepend=True,
                            with_kwargs=True,
                        ),
                        module.register_forward_hook(
                            lambda _, args, output, name=name: self._exit(name, output), always_call=True
                        ),
                    ]
            with self if self.sees_operations else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While inside, operations are ours."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def end(self) -> None:
        """The batch is over, or something has raised: its graph, and the model, may go."""
        # From here to the graph, and from the graph's hooks to here: a cycle that the garbage collector cannot see.
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.modules.clear()

    def given(self, module: Module, tensors: Sequence[Tensor]) -> None:
        """A module is about to be run, inside of `innermost`."""

    def gave(self, module: Module, tensors: Sequence[Tensor]) -> None:
        """A module was run, and is `innermost` still."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and look at its inputs and results."""
        return func(*args, **kwargs)

    def before_backward(self, context: object, loss: Tensor, scale: Tensor | float) -> None:
        """A `scale_loss` was entered."""

    def closed(self, rows: Sequence[Rows], backward: Backward | None) -> None:
        """A `scale_loss` was left."""

    def finish(self) -> None:
        """The batch was run, and its changes are not put back yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_backward = is_in_backward() and not torch.is_grad_enabled()  # else a graph of it is made
        return func(*args, **kwargs) if self.is_paused or is_backward else self.run(func, args, kwargs)

    def _enter(self, module: Module, inputs: Any) -> None:
        self.given(module, tensors_in(inputs))
        self.running.append(module)

    def _exit(self, module: Module, output: Any) -> None:
        self.gave(module, tensors_in(output))
        if self.running:
            self.running.pop()


def names_of(models: Sequence[nn.Module]) -> dict[nn.Module, Module]:
    """Each module and its name: behind that of its model where there are several, without what torch.compile adds."""
    names: dict[nn.Module, Module] = {}
    for i, model in enumerate(models):
        for path, module in model.named_modules():
            parts = (f"models[{i}]" if len(models) > 1 else "", without_compiled(path))
            names.setdefault(module, Module(".".join(filter(None, parts)), type(module).__name__))
    return names


def places_in(models: Sequence[nn.Module]) -> dict[int, Place]:
    """Return the place of each parameter by its id, with names as those of `names_of`."""
    places: dict[int, Place] = {}
    for module, (path, kind) in names_of(models).items():
        for name, param in module.named_parameters(recurse=False):
            full, first = f"{path}.{name}" if path else name, places.get(id(param))
            places[id(param)] = (
                Place(full, path, kind) if first is None else first._replace(parameter=f"{first.parameter} = {full}")
            )
    return places


def buffers_in(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers by their names, as those of `names_of`."""
    return {
        f"{path}.{name}" if path else name: buffer
        for module, (path, _) in names_of(models).items()
        for name, buffer in module.named_buffers(recurse=False)
    }


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a structure of containers."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
