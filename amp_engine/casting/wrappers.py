"""Wrappers of functions, which cast their tensor arguments and then call the original.

As in apex, a wrapper looks only at arguments at the top level, and at lists and tuples of tensors among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from amp_engine.casting.calls import Call, Casts
from amp_engine.casting.regions import TAKE_AUTOCAST_OUT, float_region, is_in_autocast
from amp_engine.errors import AmpRuntimeWarning
from amp_engine.ground.callers import warn
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.ground.torch_private import TensorBase, fake_mode, without_subclasses

F = TypeVar("F", bound=Callable[..., Any])

CASTABLE = (*LOW_PRECISION, torch.float32)  # float64 and integers are never cast

_BANNED = (
    "\namp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` "
    "It takes probabilities, and the logarithm of one that float16 rounds to 0 or 1 is infinite.\n"
    "Three ways out:\n"
    "  * use torch.nn.BCEWithLogitsLoss or F.binary_cross_entropy_with_logits on what goes into the sigmoid;\n"
    "  * call amp.register_float_function(torch, 'sigmoid') before amp.initialize, so that the probabilities "
    "are FP32 to begin with;\n"
    "  * pass allow_banned=True to amp.initialize: the loss is then computed in FP32 from rounded probabilities."
)


Function = Callable[..., Any]
Current = Callable[[], Casts | None]
Convert = Callable[[Tensor, Casts, Call | None], Tensor]
Choose = Callable[[Casts, tuple[Any, ...], dict[str, Any]], Convert | None]  # returns the conversion; may raise
Wrapper = Callable[..., Function]  # takes (fn, current, name=None); observers get `name`


def half(fn: Function, current: Current, name: str | None = None) -> Function:
    """Wrap `fn` to get floating arguments in the low-precision type, weights through the cache."""
    return _listed(fn, current, lambda casts, args, kwargs: _to_type_asked_for(kwargs) or _to_half, "half", name)


def float32(fn: Function, current: Current, name: str | None = None) -> Function:
    """Wrap `fn` to get low-precision arguments in float32."""
    return _listed(fn, current, lambda casts, args, kwargs: _to_type_asked_for(kwargs) or _to_float, "float", name)


def float32_by_dtype(fn: Function, current: Current, name: str | None = None) -> Function:
    """Wrap a function that takes `dtype`, like `float32`, but pass `dtype=torch.float32`: `fn` converts by itself.

    `fn` then saves low-precision arguments for the backward, not copies, and some CUDA kernels convert as they read.
    """
    in_float = float32(fn, current, name)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casts = current()
        if casts is None:
            return fn(*args, **kwargs)
        told = (
            casts.only_observe
            or isinstance(kwargs.get("dtype"), torch.dtype)
            or any(isinstance(value, torch.dtype) for value in args)
        )
        can_ask = not any(value is None for value in args)  # a None may be the `dtype`
        if kwargs.get("out") is not None or not (told or can_ask) or not _are_plain(args, kwargs):
            return in_float(*args, **kwargs)
        call = _observed(casts, fn, "float", name)
        low = [
            value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dtype in LOW_PRECISION
        ]
        if low and not told:
            kwargs = {**kwargs, "dtype": torch.float32}
            if call is not None:
                call.cast(low[0], torch.float32)  # these functions take one tensor
        return _run(fn, args, kwargs, None, casts, call)

    return wrapper


def promote(fn: Function, current: Current, name: str | None = None) -> Function:
    """Wrap `fn` to get all arguments in float32 if they mix float32 and low precision, 0-dim tensors included.

    torch itself would compute a half and a 0-dim float32 tensor in half. torch also handles mixes with float64.
    """
    return _listed(
        fn, current, lambda casts, args, kwargs: _to_float if _mixed(args, kwargs) else None, "promote", name
    )


def match_self(fn: Function, current: Current, name: str | None = None) -> Function:
    """Wrap an in-place method to get its other arguments in the type of the tensor that it writes to."""
    return _listed(fn, current, _to_type_of_self, "match_self", name)


def refused_function(fn: Function, current: Current, name: str | None = None) -> Function:
    """Wrap an in-place function to raise NotImplementedError on float16, which would lose range."""

    def choose(casts: Casts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.float16 in _types(args, kwargs):
            raise NotImplementedError(
                f"Cannot call in-place function {fn.__name__} with fp16 arguments.  Use "
                f"{fn.__name__.rstrip('_')}(...) instead, which runs in FP32."
            )

    return _listed(fn, current, choose, "refused_in_place", name)


def refused_method(fn: Function, current: Current, name: str | None = None) -> Function:
    """Wrap an in-place method to raise NotImplementedError on float16, which would lose range; else: `match_self`."""

    def choose(casts: Casts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Convert | None:
        if torch.float16 in _types(args[:1], {}):
            raise NotImplementedError(
                f"Cannot call in-place method {fn.__name__} on fp16 Tensors.  Use "
                f".{fn.__name__.rstrip('_')}(...) instead, which runs in FP32."
            )
        return _to_type_of_self(casts, args, kwargs)

    return _listed(fn, current, choose, "refused_in_place", name)


def banned(fn: Function, current: Current, name: str | None = None) -> Function:
    """Wrap binary_cross_entropy to raise NotImplementedError on float16 unless allowed, else to compute in float32."""

    def choose(casts: Casts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Convert:
        if not casts.allow_banned and torch.float16 in _types(args, kwargs):
            raise NotImplementedError(_BANNED)
        return _to_type_asked_for(kwargs) or _to_float

    return _listed(fn, current, choose, "banned", name)


def uncast(fn: Function, current: Current, name: str | None = None) -> Function:
    """Wrap `fn` to run without casts, also in functions that it calls (F.softmax calls Tensor.softmax)."""
    del name  # on no list, so it is not observed

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casts = current()
        if casts is None or casts.only_observe:
            return fn(*args, **kwargs)
        with float_region():
            return fn(*args, **kwargs)

    return wrapper


REGISTERED: dict[str, Wrapper] = {"half": half, "float": float32, "promote": promote}


@functools.cache  # `patched_function` is cached by its wrapper, so equal wrappers must be one object
def throughout(wrapper: Wrapper) -> Wrapper:
    """Return a `wrapper` whose functions run without further casts."""

    def wrap(fn: Function, current: Current, name: str | None = None) -> Function:
        return wrapper(uncast(fn, current), current, name)

    return wrap


def wrap(wrapper: Wrapper, fn: Any, current: Current, name: str | None = None) -> Any:
    """Return `wrapper(fn, current, name)`. An unbound static or class method stays one."""
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(wrapper(fn.__func__, current, name))
    return wrapper(fn, current, name)


def deferred(kind: str, fn: F, current: Current, without: Callable[[str, str], None] = lambda kind, name: None) -> F:
    """Wrap `fn` to be cast as `kind` ("half", "float", "promote") by the casts that are current at each call.

    If there are no casts then, `without` is called with `kind` and the name of a function that is not of amp_engine.
    """
    is_own = str(getattr(fn, "__module__", "")).startswith("amp_engine.")

    def active() -> Casts | None:
        casts = current()
        if casts is None and not is_own and not torch.compiler.is_compiling():
            without(kind, getattr(fn, "__qualname__", _name(fn)))
        return casts if casts is not None and casts.is_active else None

    return cast("F", wrap(REGISTERED[kind], fn, active))


def _listed(fn: Function, current: Current, choose: Choose, kind: str, name: str | None) -> Function:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casts = current()
        if casts is None:
            return fn(*args, **kwargs)
        convert = None if casts.only_observe else choose(casts, args, kwargs)
        return _run(fn, args, kwargs, convert, casts, _observed(casts, fn, kind, name))

    return wrapper


def _observed(casts: Casts, fn: Function, kind: str, name: str | None) -> Call | None:
    """Return a `Call` for observers; None without observers, and for calls on fake tensors, as while compiling."""
    if torch.compiler.is_compiling():
        return None
    if kind == "half" and not casts.were_used:  # others may prepare data, outside of an autocast around the model
        casts.note_use()
        _warn_of_autocast(casts)
    if not casts.is_observed or fake_mode() is not None:
        return None
    return Call(name or f"{fn.__module__}.{getattr(fn, '__qualname__', _name(fn))}", kind)


def _warn_of_autocast(casts: Casts) -> None:
    """Warn at the first call in low precision: C++ takes later ones. With `casts="model"` the model's forward warns."""
    if casts.everywhere and is_in_autocast():
        warn(
            f"Functions that amp.initialize(..., opt_level={casts.origin!r}) casts are called inside of "
            "torch.autocast, which casts their arguments once more, to its own type; on a GPU also in modules of "
            f"amp.keep_float.  {TAKE_AUTOCAST_OUT}",
            AmpRuntimeWarning,
        )


def _run(
    fn: Function,
    args: Iterable[Any],
    kwargs: dict[str, Any],
    convert: Convert | None,
    casts: Casts,
    call: Call | None,
) -> Any:
    """Call `fn` with converted arguments, but the original `out`, as `fn` would otherwise write a copy of it."""
    if convert is not None:
        args = [_convert(value, convert, casts, call) for value in args]
        kwargs = {key: v if key == "out" else _convert(v, convert, casts, call) for key, v in kwargs.items()}
    if call is not None:
        with without_subclasses():
            types = [dtype for dtype in _types(args, kwargs) if dtype.is_floating_point]
        asked = kwargs.get("dtype")
        types = [asked] if isinstance(asked, torch.dtype) and asked.is_floating_point and types else types
        with suppress(RuntimeError):  # torch does not promote float8
            call.dtype = functools.reduce(torch.promote_types, types) if types else None
        casts.tell(call)
    return _call(fn, args, kwargs)


def _call(fn: Function, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Call `fn`, and pass `fn` itself to tensor subclasses and function modes.

    torch would look `fn` up by name and pass the patched function, which their tables of functions lack.
    """
    args = tuple(args)
    if not torch.compiler.is_compiling():
        values = (*args, *kwargs.values())
        within = [item for value in values if isinstance(value, (list, tuple)) for item in value]
        if torch.overrides.has_torch_function((*values, *within)):
            fn = _METHODS.get(fn, fn)
            return torch.overrides.handle_torch_function(fn, (*values, *within), *args, **kwargs)
    return fn(*args, **kwargs)


_OPERATORS = {
    **{f"__{name}__": name for name in ("matmul", "eq", "ne", "ge", "gt", "le", "lt", "add", "sub", "mul", "div")},
    **{f"__i{name}__": f"{name}_" for name in ("add", "sub", "mul", "div")},
    **{"__radd__": "add", "__rmul__": "mul", "__truediv__": "div"},
}
# The operators that are written in C, and the methods that torch passes to subclasses and modes for them.
_METHODS: dict[Any, Any] = {
    getattr(TensorBase, operator): getattr(TensorBase, method)
    for operator, method in _OPERATORS.items()
    if hasattr(TensorBase, operator)
}


def _to_half(tensor: Tensor, casts: Casts, call: Call | None) -> Tensor:
    if type(tensor) is nn.Parameter and tensor.dtype is torch.float32 and casts.enable_caching:
        return casts.cache.cast(tensor, casts.dtype) if call is None else call.cast_weight(tensor, casts)
    return _cast(tensor, casts.dtype, call)


def _to_float(tensor: Tensor, casts: Casts, call: Call | None) -> Tensor:
    return _cast(tensor, torch.float32, call)


def _to(dtype: torch.dtype) -> Convert:
    return lambda tensor, casts, call: _cast(tensor, dtype, call)


def _to_type_of_self(casts: Casts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Convert | None:
    types = [value.dtype for value in args[:1] if isinstance(value, Tensor) and value.dtype in CASTABLE]
    return _to(types[0]) if types else None


def _to_type_asked_for(kwargs: dict[str, Any]) -> Convert | None:
    """Convert to the `dtype` argument, to which torch converts first, or to `out`'s type, which many functions need."""
    if kwargs.get("dtype") in CASTABLE:
        return _to(kwargs["dtype"])
    out = kwargs.get("out")
    return _to(out.dtype) if isinstance(out, Tensor) and out.dtype in CASTABLE else None


def _cast(tensor: Tensor, dtype: torch.dtype, call: Call | None) -> Tensor:
    if tensor.dtype is dtype or tensor.dtype not in CASTABLE:
        return tensor
    if type(tensor).__module__ == "torch.nn.attention.bias":  # it holds no values
        return tensor
    if call is not None:
        call.cast(tensor, dtype)
    return tensor.to(dtype)


def _convert(value: Any, convert: Convert, casts: Casts, call: Call | None) -> Any:
    if isinstance(value, Tensor):
        return convert(value, casts, call)
    if _is_tensor_sequence(value):
        items = [convert(item, casts, call) for item in tuple(value)]  # another thread may change the list meanwhile
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def _are_plain(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """True if no tensor argument is nested or of a subclass: functions of such tensors take no `dtype`."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return all(type(tensor) in (Tensor, nn.Parameter) and not tensor.is_nested for tensor in tensors)


def _is_tensor_sequence(value: Any) -> bool:
    """True if every element is a floating tensor and at least one has a type that is cast."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(item, Tensor) and item.is_floating_point() for item in value)
        and any(item.dtype in CASTABLE for item in value)
    )


def _types(args: Iterable[Any], kwargs: dict[str, Any]) -> set[torch.dtype]:
    """Return the types of the tensors among the arguments, without `out`."""
    types = set()
    for value in (*args, *(value for key, value in kwargs.items() if key != "out")) if kwargs else args:
        if isinstance(value, Tensor):
            types.add(value.dtype)
        elif isinstance(value, (list, tuple)):
            types.update(item.dtype for item in value if isinstance(item, Tensor))
    return types


def _mixed(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """True if the arguments have two or more floating types, all of them types that are cast."""
    types = _types(args, kwargs)
    if len(types) < 2:
        return False
    types = {dtype for dtype in types if dtype.is_floating_point}
    return len(types) > 1 and types.issubset(CASTABLE)


def _name(fn: Function) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
