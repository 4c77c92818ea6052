"""Which module an operation of autograd's graph belongs to, while a batch is run under hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from amp_engine.ground.torch_private import leaves_of


class Module(NamedTuple):
    """A module: its name in the model, "" for the model itself, and its class."""

    name: str
    type: str


class ModuleNames:
    """Follows a forward through the modules of models, by hooks that are removed at the end.

    Attributes:
        running: the modules that are being run, the innermost last.
        owner: of each node seen so far, the module that made it; None for what no module did.
    """

    def __init__(self) -> None:
        self.running: list[Module] = []
        self.owner: dict[Node, Module | None] = {}

    @property
    def innermost(self) -> Module | None:
        """The module that is being run, or None outside of all."""
        return self.running[-1] if self.running else None

    @contextmanager
    def following(
        self,
        models: Sequence[nn.Module],
        on_input: Callable[[nn.Module, list[Tensor]], None],
        on_output: Callable[[nn.Module, list[Tensor]], None],
    ) -> Iterator[None]:
        """While inside, follow these models.

        Args:
            models: and all modules in them, but those that torch.jit has compiled, which run no hooks of Python.
            on_input: told what each module is given, before it is run.
            on_output: told what each module gives.
        """
        handles = []

        def before(module: nn.Module, args: Any, kwargs: Any, *, name: Module) -> None:
            given = tensors_in((args, kwargs))
            self.claim(given)
            on_input(module, given)
            self.running.append(name)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            given = tensors_in(output)
            self.claim(given)
            if self.running:
                self.running.pop()
            on_output(module, given)

        try:
            for module, name in names_of(models).items():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                handles.append(
                    module.register_forward_pre_hook(
                        lambda module, args, kwargs, name=name: before(module, args, kwargs, name=name),
                        prepend=True,
                        with_kwargs=True,
                    )
                )
                handles.append(module.register_forward_hook(after, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def claim(self, tensors: Sequence[Tensor]) -> list[Node]:
        """What made these tensors, and nobody has claimed, was made by the module that is being run. Returns it."""
        found = []
        left: list[Node | None] = [tensor.grad_fn for tensor in tensors]
        while left:
            node = left.pop()
            if node is None or node in self.owner:
                continue
            self.owner[node] = self.innermost
            found.append(node)
            left += [following for following, _ in node.next_functions]
        return found


def names_of(models: Sequence[nn.Module]) -> dict[nn.Module, Module]:
    """Each module and its name: behind that of its model where there are several, without what torch.compile adds."""
    names = {}
    for i, model in enumerate(models):
        for path, module in model.named_modules():
            parts = [f"models[{i}]"] if len(models) > 1 else []
            parts += [part for part in path.split(".") if part not in ("", "_orig_mod")]
            names[module] = Module(".".join(parts), type(module).__name__)
    return names


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in what a module took or gave."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
