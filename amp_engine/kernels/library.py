"""Operations: functions of tensors that the compiled kernels compute if they can, and that tracers see as operators.

In eager mode an operation computes directly, as the dispatcher takes microseconds per tensor. Under a tracer
(torch.compile, fake tensors) it calls its operator of torch.library, `torch.ops.amp_engine.<name>`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from amp_engine.ground.torch_private import disabled_torch_dispatch, dispatch_modes
from amp_engine.kernels.choice import NATIVE

_LIBRARY = torch.library.Library("amp_engine", "DEF")  # its operators live as long as this object
P = ParamSpec("P")
R = TypeVar("R")


def operation(
    schema: str, fake: Callable[..., Any], returns: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make an operation of a function in plain PyTorch. The function computes if there are no kernels.

    Args:
        schema: the arguments and results of its operator.
        fake: computes the operator on fake tensors.
        returns: turns the operator's result into the function's.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        plain = torch.no_grad()(function)

        def computing(tensor: Tensor | None) -> Callable[..., Any]:
            module = NATIVE.get("cpu" if tensor is None else tensor.device.type)
            return plain if module is None else getattr(module, name)

        def compute(first: Tensor | Sequence[Tensor], /, *args: Any, **kwargs: Any) -> Any:
            return computing(_one_of(first))(first, *args, **kwargs)

        @wraps(function)
        def call(first: Tensor | Sequence[Tensor], /, *args: Any, **kwargs: Any) -> Any:
            tensor = _one_of(first)
            if is_traced(tensor):
                found = call_operator(name, first, *args, **kwargs)
            else:
                found = computing(tensor)(first, *args, **kwargs)
            return found if returns is None else returns(*found)

        define(name, compute, schema, fake)
        return call  # type: ignore[return-value]

    return decorate


def is_traced(tensor: Tensor | None) -> bool:
    """True if a tracer records operations on `tensor`."""
    return (
        torch.compiler.is_compiling()
        or dispatch_modes()
        or (tensor is not None and type(tensor).__torch_dispatch__ is not disabled_torch_dispatch)
    )


def call_operator(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call `torch.ops.amp_engine.<name>` without gradients."""
    with torch.no_grad():
        return getattr(torch.ops.amp_engine, name)(*args, **kwargs)


def define(name: str, eager: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> None:
    """Define the operator `torch.ops.amp_engine.<name>`, which `eager` computes."""
    # Not torch.library.custom_op: its autograd functions took a third of the time of `import amp_engine`, and no
    # operator is differentiated.
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_engine::{name}", fake, lib=_LIBRARY)


def fake_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the fake of an operator that only writes."""


def _one_of(first: Tensor | Sequence[Tensor]) -> Tensor | None:
    if isinstance(first, Tensor):
        return first
    return first[0] if len(first) else None
