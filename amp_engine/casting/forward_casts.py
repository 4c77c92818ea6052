"""Casts at `forward`: subclasses that cast replace the classes of a model and its parts, as FSDP2 replaces classes.

torch's call of a module, a direct `module.forward(x)` and every user's hook see inputs before the casts and outputs
after them. The subclass has the name, module and signature of the module's own class. An attribute of the module says
what to cast: copies, replicas and pickles have it too, and other instances of the subclass cast nothing.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import is_
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from amp_engine.casting.inputs import Arguments, Inputs
from amp_engine.casting.model_warnings import ModelWarnings
from amp_engine.casting.one_type import mixed_types, of_one_type
from amp_engine.casting.regions import cast_region, is_outside
from amp_engine.ground.containers import GivenMappings, cast_tensors
from amp_engine.ground.distributed import is_fsdp2
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.ground.dynamo import part_of_a_graph
from amp_engine.ground.torch_private import is_in_backward

_CASTS = "_amp_engine_casts"
_OUTSIDE = "_amp_engine_called_from_outside"
_OWN_CLASS = "_amp_engine_own_class"

_inside = threading.local()  # `.forward`: True while this thread runs a forward that casts


@dataclass(frozen=True)
class ForwardCasts:
    """The casts of one forward.

    Attributes:
        inputs, outputs: the types to which floating inputs and outputs are cast; None: they are not cast. With `inputs`
            torch's own layers take inputs in the type of their weights, also inside of a forward.
        functions: True if functions are cast inside, unless another region is already open.
        of_part: True if the module is part of a model. It casts only when called from outside of every forward that
            casts, and casts inputs only to a type that one of its parameters has: not for a batch norm in FP32.
        of_typed: True if a module with parameters, but none of type `inputs`, casts nothing, such as a copy that was
            converted.
        of_island: True if the module computes in FP32 inside of a half model: it casts half inputs in each call, and
            outputs only in calls from inside of a forward that casts.
        keeps_half: True if a part that is called from outside gives half outputs, as it did before the cast.
        of_model: casts the inputs, the same for the model and its parts.
        warnings: what is said once, the same for the model and its parts.
    """

    inputs: torch.dtype | None
    outputs: torch.dtype | None
    functions: bool = False
    of_part: bool = False
    of_typed: bool = False
    of_island: bool = False
    keeps_half: bool = False
    of_model: Inputs = field(default_factory=Inputs, compare=False)
    warnings: ModelWarnings = field(default_factory=ModelWarnings, compare=False)


def cast_forward(module: nn.Module, casts: ForwardCasts) -> None:
    """Have the forward of `module` cast from now on as `casts` says, instead of earlier casts.

    Changes nothing if the class cannot be replaced, such as that of a scripted module or one with its own slots.
    """
    _inside.forward = False  # the attribute exists from now on: Dynamo guards that; an interrupt may have left it True
    with suppress(TypeError):
        if not isinstance(module, _CastsAtForward) and type(module).forward is not nn.Module.forward:
            _change_class(module, _casting)
        vars(module)[_CASTS] = casts


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in `module` that have parameters and can cast, and lists of modules.

    Skips modules that compute a parametrized weight, because any code may read that weight.
    """
    for part in module.children():
        if isinstance(part, (torch.jit.ScriptModule, ParametrizationList)):
            continue
        has_own_forward = is_fsdp2(part) or isinstance(part, torch.fx.GraphModule) or "forward" in vars(part)
        is_list = type(part).forward is nn.Module.forward
        if not has_own_forward and (is_list or next(part.parameters(), None) is not None):
            yield part
        yield from parts_of(part)


def cast_joining(part: nn.Module, module: nn.Module) -> None:
    """Have `part`, which is added to `module`, cast like the other parts of `module`."""
    casts = casts_of(module)
    if casts is not None and (casts.inputs is not None or casts.functions):
        for one in parts_of(nn.ModuleList([part])):
            if casts_of(one) is None:
                cast_forward(one, replace(casts, of_part=True))


def casts_of(model: nn.Module) -> ForwardCasts | None:
    """Return the casts that `cast_forward` gave to `model`, or to the model that it is a copy of."""
    return vars(model).get(_CASTS)


def restore_class(model: nn.Module) -> None:
    """Restore the class of `model`. A class that other code has derived from the subclass stays, without casts."""
    vars(model).pop(_CASTS, None)
    vars(model).pop(_OUTSIDE, None)
    _change_class(model, lambda cls: vars(cls).get(_OWN_CLASS, cls))


def is_cast_at_forward(model: nn.Module) -> bool:
    """True if a call of `model` reaches the forward that casts, not one that was assigned to the instance."""
    # Other code may have changed the class since `cast_forward`.
    return isinstance(model, _CastsAtForward) and casts_of(model) is not None and "forward" not in vars(model)


def is_inside() -> bool:
    """True if this thread runs a forward that casts."""
    return getattr(_inside, "forward", False)


def is_called_from_outside() -> bool:
    """True if this thread runs neither a forward that casts nor a model that casts by hooks instead."""
    return not is_inside() and (torch.compiler.is_compiling() or not _is_called_by_cast_model())


def _is_called_by_cast_model() -> bool:
    for frame in stack():
        if frame.f_code is _CALL:
            module = frame.f_locals.get("self")
            casts = casts_of(module) if isinstance(module, nn.Module) else None
            if casts is not None and not (casts.of_part or casts.of_island):
                return True
    return False


def stack() -> Iterator[FrameType]:
    """Yield the frames of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


_CALL: CodeType = nn.Module.__call__.__code__
_NEW_OBJECT: Any = vars(copyreg)["__newobj__"]


class _CastsAtForward:
    """The first base of each subclass that casts, before the model's own class."""

    _amp_engine_casts = None  # no annotation, as torch.jit.script would read it

    def __init_subclass__(cls) -> None:
        """Do not call `__init_subclass__` of a user's class, which may keep a list of its subclasses."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or reduced[0] is not _NEW_OBJECT or reduced[1][:1] != (type(self),):
            return reduced
        own = vars(type(self)).get(_OWN_CLASS)
        return reduced if own is None else (new_instance, (own, *reduced[1][1:]), *reduced[2:])


def new_instance(own: type[nn.Module], *args: Any) -> nn.Module:
    """Make an empty instance of the subclass of `own`, for pickle."""
    instance: nn.Module = own.__new__(own, *args)
    _set_class(instance, _casting(own))
    return instance


def _casting(own: type[nn.Module]) -> Any:
    """Return the subclass of `own` that casts; it is made only once while it is referred to."""
    for known in type.__subclasses__(own):
        if vars(known).get(_OWN_CLASS) is own:
            return known

    in_one_type = of_one_type(own.forward)
    arguments = Arguments.of_class(own)

    @functools.wraps(own.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        casts: ForwardCasts | None = getattr(self, _CASTS, None)  # a forward that was kept is called after `close`
        called = own.forward if casts is None or casts.inputs is None else in_one_type
        if casts is None or (casts.of_part and getattr(_inside, "forward", False)):
            return called(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return _cast_around(called, arguments, casts, self, args, kwargs)
        try:
            return _cast_around(called, arguments, casts, self, args, kwargs)
        except RuntimeError as error:
            explained = mixed_types(error, self, casts.inputs)
            if explained is None:
                raise
            raise explained from error

    function: Any = forward
    function.__code__ = function.__code__.replace()  # Dynamo counts compilations by code object

    with suppress(TypeError, ValueError):
        function.__signature__ = inspect.signature(own.forward)  # inspect.getfullargspec reads it
    names = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "forward": forward,
        _OWN_CLASS: own,
    }
    metaclass: Any = type(own)
    return metaclass(own.__name__, (_CastsAtForward, own), names)


def _cast_around(
    forward: Callable[..., Any],
    arguments: Arguments,
    casts: ForwardCasts,
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> Any:
    inputs, outputs = casts.inputs, casts.outputs
    if not (casts.of_part or casts.of_island or torch.compiler.is_compiling()):
        casts.warnings.warn_of_autocast()
    if casts.of_island:
        if is_called_from_outside() and not _is_recomputed(module):
            outputs = None
    elif casts.of_part:
        is_in_region = casts.functions and inputs is None and not is_outside()
        if is_in_region or not is_called_from_outside():
            return forward(module, *args, **kwargs)
        if not torch.compiler.is_compiling():
            casts.warnings.warn_of_autocast()
        outputs = None if casts.keeps_half else outputs
        if _is_recomputed(module):
            inputs = outputs = None  # kept modules in it are called from inside
        elif not has_parameter_of(module, inputs):
            inputs = None
    elif casts.of_typed and not has_parameter_of(module, inputs) and any(True for _ in module.parameters()):
        inputs = outputs = None  # a replica of DataParallel has no parameters, but casts
    mappings = None
    if inputs is not None:
        given = args, kwargs
        if casts.of_island:
            args, kwargs = (cast_tensors(value, inputs, LOW_PRECISION) for value in given)
        else:
            args, kwargs = casts.of_model.cast(inputs, arguments, args, kwargs)
        mappings = GivenMappings(_values(given), _values((args, kwargs)))
        if casts.of_part and _is_in_backward() and all(map(is_, _values(given), _values((args, kwargs)))):
            outputs = None  # a part that the model calls as well, which had no cast to do
    before = is_inside()
    _inside.forward = True
    try:
        if casts.functions and is_outside():
            with cast_region():
                output = forward(module, *args, **kwargs)
        else:
            output = forward(module, *args, **kwargs)
    finally:
        _inside.forward = before

    if inputs in LOW_PRECISION and not (casts.of_island or torch.compiler.is_compiling()):
        casts.warnings.look_at_output(output, type(module).__name__)

    def cast(value: Any) -> Any:
        return value if outputs is None else cast_tensors(value, outputs)

    return cast(output) if mappings is None else mappings.write_back(output, cast)


def _values(given: tuple[Any, Any]) -> list[Any]:
    return [*given[0], *given[1].values()]


def _is_in_backward() -> bool:
    """True in a backward, where an activation checkpoint calls parts that ran inside or outside of their model."""
    return not torch.compiler.is_compiling() and is_in_backward()


def _is_recomputed(module: nn.Module) -> bool:
    """True if an activation checkpoint recomputes a part that only the model had called. Notes calls from outside."""
    if torch.compiler.is_compiling():
        return False
    if not is_in_backward():
        vars(module)[_OUTSIDE] = True
    return _OUTSIDE not in vars(module)


def has_parameter_of(module: nn.Module, dtype: torch.dtype | None) -> bool:
    """True if a parameter of the module or of its parts has this type."""
    return any(param.dtype is dtype for param in module.parameters())


part_of_a_graph(_cast_around, compile_what_it_calls=True)  # for graphs that break inside of the `try`


def _change_class(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Change the class of `module`, or the base of the class that torch made for a parametrization."""
    cls: Any = type(module)
    is_made = is_parametrized(module) and len(cls.__bases__) == 1
    before = cls.__bases__[0] if is_made else cls
    after = change(before)
    if after is not before:
        _set_class(module, type(cls)(cls.__name__, (after,), dict(vars(cls))) if is_made else after)


def _set_class(model: nn.Module, cls: type) -> None:
    object.__dict__["__class__"].__set__(model, cls)  # bypasses the user's own `__setattr__` and `__class__`
