"""Operations as operators of torch.library, for what traces.

In eager mode a function computes directly: the dispatcher takes microseconds per tensor. Where something traces
(torch.compile, fake tensors) it calls `torch.ops.amp_engine.<name>`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_engine.ground.torch_private import disabled_torch_dispatch, dispatch_modes

_LIBRARY = torch.library.Library("amp_engine", "DEF")  # its operators live as long as it does


def call(name: str, eager: Callable[..., Any], tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """The operator where something traces `tensors`, else `eager`."""
    if torch.compiler.is_compiling() or dispatch_modes() or (len(tensors) and _is_dispatched(tensors[0])):
        with torch.no_grad():
            return getattr(torch.ops.amp_engine, name)(*args, **kwargs)
    return eager(*args, **kwargs)


def _is_dispatched(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not disabled_torch_dispatch


def define(name: str, eager: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> None:
    """Make an operator `torch.ops.amp_engine.<name>` of `eager`."""
    # Not torch.library.custom_op: it makes an autograd function for each operator, a third of the time of `import
    # amp_engine`, and nothing here is differentiated.
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_engine::{name}", fake, lib=_LIBRARY)


def fake_nothing(*args: Any, **kwargs: Any) -> None:
    """What an operator that only writes does with tensors that hold nothing."""
