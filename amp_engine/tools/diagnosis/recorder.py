"""Follows one batch: the modules that run, their inputs and outputs, and each operation of the forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amp_engine.ground.torch_private import DispatchMode, is_in_backward, leaves_of, without_compiled
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.rows import Rows
from amp_engine.tools.diagnosis.post_mortem import Place


class Module(NamedTuple):
    """A module: its name in the model, "" for the model itself, and its class."""

    name: str
    type: str | None

    def path_to(self, tensor: str) -> str:
        """The name in the model of one of the module's own parameters or buffers."""
        return f"{self.name}.{tensor}" if self.name else tensor


class Recorder(DispatchMode):
    """Calls its own methods `given`, `gave` and `run` while a batch runs inside of `following`.

    Args:
        models: followed with all of their modules, except those that torch.jit has compiled, which run no hooks.

    Attributes:
        sees_operations: True if `run` is called, at the cost of a Python call for each operation.
        modules: each module, and its name.
        running: the modules that are running, the innermost last.
        handles: handles of hooks on the graph, until `end`.
        is_paused: True while operations do not call `run`.
        was_backward: True after a backward or an entered `scale_loss`.
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
        """The innermost module that is running, or None outside of all modules."""
        return self.running[-1] if self.running else None

    @contextmanager
    def following(self) -> Iterator[None]:
        """While inside, call the methods for modules, and for operations if `sees_operations`."""
        handles: list[RemovableHandle] = []
        try:
            for module, name in self.modules.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    # Functions, because a deepcopy of a module shares them, but would copy the object of a method.
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
        """While inside, operations do not call `run`."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def end(self) -> None:
        """Remove the hooks and forget the modules, after a batch or an error, so that graph and model can be freed."""
        # This object and the hooks of the graph refer to each other; the garbage collector cannot see the cycle.
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.modules.clear()

    def given(self, module: Module, tensors: Sequence[Tensor]) -> None:
        """Called before a module runs; `innermost` is the module around it."""

    def gave(self, module: Module, tensors: Sequence[Tensor]) -> None:
        """Called after a module has run, while it is still `innermost`."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation. Subclasses check its inputs and results."""
        return func(*args, **kwargs)

    def before_backward(self, context: object, backward: Backward, loss: Tensor) -> None:
        """Called at the entry of a `scale_loss`."""

    def closed(self, rows: Sequence[Rows], backward: Backward | None) -> None:
        """Called at the exit of a `scale_loss`."""

    def finish(self) -> None:
        """Called after the batch, before its changes are undone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_backward = is_in_backward() and not torch.is_grad_enabled()  # with grad mode it is recorded, like a forward
        return func(*args, **kwargs) if self.is_paused or is_backward else self.run(func, args, kwargs)

    def _enter(self, module: Module, inputs: Any) -> None:
        self.given(module, tensors_in(inputs))
        self.running.append(module)

    def _exit(self, module: Module, output: Any) -> None:
        self.gave(module, tensors_in(output))
        if self.running:
            self.running.pop()


def names_of(models: Sequence[nn.Module]) -> dict[nn.Module, Module]:
    """Each module and its name, without torch.compile's parts; with several models, after the name of its model."""
    names: dict[nn.Module, Module] = {}
    for i, model in enumerate(models):
        for path, module in model.named_modules():
            parts = (f"models[{i}]" if len(models) > 1 else "", without_compiled(path))
            names.setdefault(module, Module(".".join(filter(None, parts)), type(module).__name__))
    return names


def places_in(models: Sequence[nn.Module]) -> dict[int, Place]:
    """Return the place of each parameter by its id, with module names from `names_of`."""
    places: dict[int, Place] = {}
    for module, named in names_of(models).items():
        for name, param in module.named_parameters(recurse=False):
            path, first = named.path_to(name), places.get(id(param))
            places[id(param)] = (
                Place(path, named.name, named.type)
                if first is None
                else first._replace(parameter=f"{first.parameter} = {path}")
            )
    return places


def buffers_in(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers by name, with module names from `names_of`."""
    return {
        named.path_to(name): buffer
        for module, named in names_of(models).items()
        for name, buffer in module.named_buffers(recurse=False)
    }


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a structure of containers."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
