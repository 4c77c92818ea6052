"""Casts at a model's `forward`: the class of the model is swapped for a subclass that casts, as FSDP2 swaps classes.

Torch's call of the model, a direct `model.forward(x)` and every user's hook see the types outside of the casts. The
subclass has the name, module and signature of the model's own class. What to cast is an attribute of the model, so that
copies, replicas and pickles take it along, and other instances of the subclass are left alone.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from amp_engine.casting.regions import cast_region, is_outside
from amp_engine.containers import cast_tensors

_CASTS = "_amp_engine_casts"
_OWN_CLASS = "_amp_engine_own_class"


@dataclass(frozen=True)
class ForwardCasts:
    """What a forward casts.

    Attributes:
        inputs, outputs: the types to which it casts floating inputs and outputs; None leaves them alone.
        functions: whether functions are cast inside, where nothing else is said; the outputs of such a call are FP32
            if `outputs` says nothing else.
    """

    inputs: torch.dtype | None
    outputs: torch.dtype | None
    functions: bool = False


OF_A_PART = ForwardCasts(None, None, functions=True)
"""Of a part of a model inside of whose forward functions are cast."""


def cast_forward(model: nn.Module, casts: ForwardCasts) -> None:
    """Have the forward of `model` cast from now on, by `casts` alone.

    Nothing is changed where a class cannot be swapped: that of a scripted module, or with slots of its own.
    """
    with suppress(TypeError):
        if not isinstance(model, _CastsAtForward):
            _set_class(model, _casting(type(model)))
        vars(model)[_CASTS] = casts


def casts_of(model: nn.Module) -> ForwardCasts | None:
    """The casts that `cast_forward` gave to `model`, or to what it is a copy of."""
    return vars(model).get(_CASTS)


def restore_class(model: nn.Module) -> None:
    """Give `model` its own class back. Where another was made of the subclass since, that goes on without casts."""
    vars(model).pop(_CASTS, None)
    own = vars(type(model)).get(_OWN_CLASS)
    if own is not None:
        _set_class(model, own)


def is_cast_at_forward(model: nn.Module) -> bool:
    """True if a call of `model` reaches the forward that casts; one assigned to the instance does not."""
    # A class of its own could have been given to it since.
    return isinstance(model, _CastsAtForward) and casts_of(model) is not None and "forward" not in vars(model)


def is_inside_cast_forward() -> bool:
    """True if this thread runs the forward of a cast model. Looks at the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _CALL or (code.co_filename == __file__ and code.co_name == "forward"):
            module = frame.f_locals.get("self")
            module = getattr(module, "_orig_mod", module)  # of torch.compile, whose frames are not those of the source
            if isinstance(module, nn.Module) and casts_of(module) is not None:
                return True
        if code.co_name.startswith("torch_dynamo_resume_in_"):
            return True  # maybe
        frame = frame.f_back
    return False


_NEW_OBJECT: Any = vars(copyreg)["__newobj__"]
_CALL: CodeType = nn.Module.__call__.__code__


class _CastsAtForward:
    """Comes before the own class of a model."""

    _amp_engine_casts = None  # torch.jit.script reads annotations

    def __init_subclass__(cls) -> None:
        """Say nothing to what a user's class would note of its subclasses."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or reduced[0] is not _NEW_OBJECT or reduced[1][:1] != (type(self),):
            return reduced
        own = vars(type(self)).get(_OWN_CLASS)
        return reduced if own is None else (new_instance, (own, *reduced[1][1:]), *reduced[2:])


def new_instance(own: type[nn.Module], *args: Any) -> nn.Module:
    """An empty instance of the subclass of `own`, for pickle."""
    instance: nn.Module = own.__new__(own, *args)
    _set_class(instance, _casting(own))
    return instance


def _casting(own: type[nn.Module]) -> Any:
    """The subclass of `own` that casts; the same one as long as somebody has it."""
    for known in type.__subclasses__(own):
        if vars(known).get(_OWN_CLASS) is own:
            return known

    @functools.wraps(own.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        casts: ForwardCasts | None = self._amp_engine_casts
        if casts is None:
            return own.forward(self, *args, **kwargs)
        outputs = casts.outputs
        if casts.inputs is not None:
            args, kwargs = cast_tensors(args, casts.inputs), cast_tensors(kwargs, casts.inputs)
        if casts.functions and is_outside():
            with cast_region():
                output = own.forward(self, *args, **kwargs)
            outputs = outputs or torch.float32
        else:
            output = own.forward(self, *args, **kwargs)
        return output if outputs is None else cast_tensors(output, outputs)

    with suppress(TypeError, ValueError):
        forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]  # getfullargspec asks it
    names = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "forward": forward,
        _OWN_CLASS: own,
    }
    metaclass: Any = type(own)
    return metaclass(own.__name__, (_CastsAtForward, own), names)


def _set_class(model: nn.Module, cls: type) -> None:
    object.__setattr__(model, "__class__", cls)  # not by a `__setattr__` of the user's
