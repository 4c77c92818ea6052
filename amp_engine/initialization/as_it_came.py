"""What a model says of its own types: that it came in half, and what it names to stay in FP32."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from amp_engine.ground.dtypes import is_low_precision

_NAMED = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""The attributes in which models of transformers and diffusers name modules and parameters that stay FP32."""


_IN_HALF = "_amp_engine_came_in_half"
"""Attribute of a module that a level cast: type by name of its own tensors that came in half. Copies have it too."""


def note(module: nn.Module) -> None:
    """Note, before a cast, which tensors of the module itself are half."""
    vars(module)[_IN_HALF] = _half_now(module)


def came_in(module: nn.Module) -> dict[str, torch.dtype]:
    """Name -> type of the module's own parameters and buffers that came in half, or are half if it was not cast."""
    came: dict[str, torch.dtype] | None = vars(module).get(_IN_HALF)
    return _half_now(module) if came is None else came


def tensors_in_half(module: nn.Module) -> Iterator[tuple[Tensor, torch.dtype]]:
    """Yield the module's own parameters and buffers that came in half, with the types in which they came."""
    came = came_in(module)
    tensors = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    yield from ((tensor, came[name]) for name, tensor in tensors if name in came)


def forget(module: nn.Module) -> None:
    """Forget what `note` noted."""
    vars(module).pop(_IN_HALF, None)


def _half_now(module: nn.Module) -> dict[str, torch.dtype]:
    tensors = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return {name: tensor.dtype for name, tensor in tensors if is_low_precision(tensor)}


def came_in_half(model: nn.Module) -> bool:
    """True if a parameter of `model` came in low precision."""
    of_each = ((came_in(module), module.named_parameters(recurse=False)) for module in model.modules())
    return any(name in came for came, params in of_each for name, _ in params)


_LABELS = frozenset(("label", "labels"))
"""Arguments of a forward that computes the loss, as those of transformers."""


def left_alone_of(model: nn.Module, asked: frozenset[str] | None) -> frozenset[str] | None:
    """Return the names of arguments that are not cast: those asked for, and labels of a model that came in half.

    Its script has cast what such a model computes with, and losses take FP32 labels beside half outputs.
    """
    return asked if asked is None or not came_in_half(model) else asked | _LABELS


def declared_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and each outermost module that the model, or a model inside of it, names to stay in FP32."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for outer, of, pattern in _declaring(model):
        for path, module in of.named_modules():
            if path and pattern.search(path):
                for inner_path, one in _called(path, module):
                    found.setdefault(id(one), (_joined(outer, inner_path), one))
    inner = {id(one) for _, module in found.values() for one in module.modules() if one is not module}
    yield from (one for key, one in found.items() if key not in inner)


def _called(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module, or if it is a list, what it lists: a list is not called."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _called(f"{path}.{name}", child)


def declared_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and each parameter or buffer that the model, or a model inside of it, names to stay in FP32."""
    for outer, of, pattern in _declaring(model):
        tensors: Iterator[tuple[str, Tensor]] = chain(of.named_parameters(), of.named_buffers())
        yield from ((_joined(outer, name), tensor) for name, tensor in tensors if pattern.search(name))


def _declaring(model: nn.Module) -> Iterator[tuple[str, nn.Module, re.Pattern[str]]]:
    """Yield the path of each model in `model` that names what stays FP32, and what matches these names."""
    for path, of in model.named_modules():
        entries: list[str] = []
        for attribute in _NAMED:
            named = getattr(of, attribute, None)
            entries += [named] if isinstance(named, str) else named if isinstance(named, (list, tuple, set)) else ()
        entries = [entry for entry in entries if isinstance(entry, str)]
        if entries:
            yield path, of, re.compile(rf"(^|\.)({'|'.join(map(re.escape, entries))})$")


def _joined(outer: str, path: str) -> str:
    return f"{outer}.{path}" if outer else path
