"""What a patched function does: look at its tensor arguments, cast, call on.

As in apex only arguments at the top level are looked at, and lists and tuples of tensors among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from amp_engine.casting.cache import WeightCache
from amp_engine.dtypes import LOW_PRECISION

F = TypeVar("F", bound=Callable[..., Any])

CASTABLE = (*LOW_PRECISION, torch.float32)  # float64 and integers are never touched

_BANNED = (
    "\namp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` "
    "It takes probabilities, and the logarithm of one that float16 rounds to 0 or 1 is infinite.\n"
    "Three ways out:\n"
    "  * use torch.nn.BCEWithLogitsLoss or F.binary_cross_entropy_with_logits on what goes into the sigmoid;\n"
    "  * call amp.register_float_function(torch, 'sigmoid') before amp.initialize, so that the probabilities "
    "are FP32 to begin with;\n"
    "  * pass allow_banned=True to amp.initialize: the loss is then computed in FP32 from rounded probabilities."
)


class Casts(Protocol):
    """What a wrapper asks of the casts that it belongs to."""

    dtype: torch.dtype
    cache: WeightCache
    enable_caching: bool
    allow_banned: bool

    @property
    def is_active(self) -> bool:
        """Whether to cast at all."""

    def disabled_in_thread(self) -> AbstractContextManager[None]:
        """No casts inside, in this thread."""

    def trace(self, source: torch.dtype, target: torch.dtype, function: str) -> None:
        """Told of each cast, for verbose output."""


Function = Callable[..., Any]
Current = Callable[[], Casts | None]
Wrapper = Callable[[Function, Current], Function]
Convert = Callable[[Tensor, Casts, Function], Tensor]


def half(fn: Function, current: Current) -> Function:
    """Floating arguments in the low-precision type; weights through the cache."""
    return _listed(fn, current, _to_half)


def float32(fn: Function, current: Current) -> Function:
    """Low-precision arguments in float32."""
    return _listed(fn, current, _to_float)


def promote(fn: Function, current: Current) -> Function:
    """Arguments in float32 where it meets low precision, 0-dim tensors included.

    torch itself would let a half tensor decide over a 0-dim float32 one. Mixes with float64 are torch's.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casts = current()
        if casts is None or not _mixed(args, kwargs):
            return fn(*args, **kwargs)
        return fn(*_each(args, _to_float, casts, fn), **_each_keyword(kwargs, _to_float, casts, fn))

    return wrapper


def match_self(fn: Function, current: Current) -> Function:
    """Of an in-place method: the other arguments in the type of the tensor written to."""

    @functools.wraps(fn)
    def wrapper(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        casts = current()
        if casts is None or self.dtype not in CASTABLE:
            return fn(self, *args, **kwargs)
        to = _to(self.dtype)
        return fn(self, *_each(args, to, casts, fn), **_each_keyword(kwargs, to, casts, fn))

    return wrapper


def refused_function(fn: Function, current: Current) -> Function:
    """Of an in-place function: an error where float16 would lose range."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if current() is not None and torch.float16 in _types(args, kwargs):
            raise NotImplementedError(
                f"Cannot call in-place function {fn.__name__} with fp16 arguments.  Type "
                f"{fn.__name__.rstrip('_')}(...) instead, which runs in FP32."
            )
        return fn(*args, **kwargs)

    return wrapper


def refused_method(fn: Function, current: Current) -> Function:
    """Of an in-place method: an error where float16 would lose range, else as `match_self`."""
    matched = match_self(fn, current)

    @functools.wraps(fn)
    def wrapper(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is torch.float16 and current() is not None:
            raise NotImplementedError(
                f"Cannot call in-place method {fn.__name__} on fp16 Tensors.  Type "
                f".{fn.__name__.rstrip('_')}(...) instead, which runs in FP32."
            )
        return matched(self, *args, **kwargs)

    return wrapper


def banned(fn: Function, current: Current) -> Function:
    """Of binary_cross_entropy: an error on float16 unless allowed, float32 otherwise."""
    in_float = float32(fn, current)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casts = current()
        if casts is not None and not casts.allow_banned and torch.float16 in _types(args, kwargs):
            raise NotImplementedError(_BANNED)
        return in_float(*args, **kwargs)

    return wrapper


REGISTERED: dict[str, Wrapper] = {"half": half, "float": float32, "promote": promote}


@functools.cache  # the same wrapper for the same, as that of a patched function is part of its identity
def throughout(wrapper: Wrapper) -> Wrapper:
    """`wrapper` whose word is the last: the function runs without further casts (F.softmax calls Tensor.softmax)."""

    def wrap(fn: Function, current: Current) -> Function:
        @functools.wraps(fn)
        def uncast_inside(*args: Any, **kwargs: Any) -> Any:
            casts = current()
            if casts is None:
                return fn(*args, **kwargs)
            with casts.disabled_in_thread():
                return fn(*args, **kwargs)

        return wrapper(uncast_inside, current)

    return wrap


def wrap(wrapper: Wrapper, fn: Any, current: Current) -> Any:
    """`wrapper(fn, current)`; a static or class method, as it stands in the class, stays one."""
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(wrapper(fn.__func__, current))
    return wrapper(fn, current)


def deferred(kind: str, fn: F, current: Current) -> F:
    """`fn`, cast as `kind` ("half", "float", "promote") says by the casts that are current when it is called."""

    def active() -> Casts | None:
        casts = current()
        return casts if casts is not None and casts.is_active else None

    return cast("F", wrap(REGISTERED[kind], fn, active))


def _listed(fn: Function, current: Current, listed: Convert) -> Function:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casts = current()
        if casts is None:
            return fn(*args, **kwargs)
        to = _to_type_of_out(kwargs) or listed
        return fn(*_each(args, to, casts, fn), **_each_keyword(kwargs, to, casts, fn))

    return wrapper


def _to_half(tensor: Tensor, casts: Casts, fn: Function) -> Tensor:
    if type(tensor) is nn.Parameter and tensor.dtype is torch.float32 and casts.enable_caching:
        return casts.cache.cast(tensor, casts.dtype, lambda: casts.trace(torch.float32, casts.dtype, _name(fn)))
    return _cast(tensor, casts.dtype, casts, fn)


def _to_float(tensor: Tensor, casts: Casts, fn: Function) -> Tensor:
    return _cast(tensor, torch.float32, casts, fn)


def _to(dtype: torch.dtype) -> Convert:
    return lambda tensor, casts, fn: _cast(tensor, dtype, casts, fn)


def _to_type_of_out(kwargs: dict[str, Any]) -> Convert | None:
    """Where the result is written to a floating `out`, its type decides: many functions allow no other."""
    out = kwargs.get("out")
    return _to(out.dtype) if isinstance(out, Tensor) and out.dtype in CASTABLE else None


def _cast(tensor: Tensor, dtype: torch.dtype, casts: Casts, fn: Function) -> Tensor:
    if tensor.dtype is dtype or tensor.dtype not in CASTABLE:
        return tensor
    casts.trace(tensor.dtype, dtype, _name(fn))
    return tensor.to(dtype)


def _each(values: Iterable[Any], convert: Convert, casts: Casts, fn: Function) -> list[Any]:
    return [_convert(value, convert, casts, fn) for value in values]


def _each_keyword(kwargs: dict[str, Any], convert: Convert, casts: Casts, fn: Function) -> dict[str, Any]:
    """Keyword arguments, all cast but `out`: a copy of it would be written to instead."""
    return {key: value if key == "out" else _convert(value, convert, casts, fn) for key, value in kwargs.items()}


def _convert(value: Any, convert: Convert, casts: Casts, fn: Function) -> Any:
    if isinstance(value, Tensor):
        return convert(value, casts, fn)
    if _is_tensor_sequence(value):
        items = [convert(item, casts, fn) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def _is_tensor_sequence(value: Any) -> bool:
    """Whether every element is a floating tensor and at least one is of a type that is cast."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(item, Tensor) and item.is_floating_point() for item in value)
        and any(item.dtype in CASTABLE for item in value)
    )


def _types(args: Iterable[Any], kwargs: dict[str, Any]) -> set[torch.dtype]:
    """Types of the tensors among the arguments, `out` aside."""
    types = set()
    for value in (*args, *(value for key, value in kwargs.items() if key != "out")) if kwargs else args:
        if isinstance(value, Tensor):
            types.add(value.dtype)
        elif isinstance(value, (list, tuple)):
            types.update(item.dtype for item in value if isinstance(item, Tensor))
    return types


def _mixed(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether low precision meets another of the types that are cast, and float64 is not among them."""
    types = _types(args, kwargs)
    if len(types) < 2:
        return False
    types = {dtype for dtype in types if dtype.is_floating_point}
    return len(types) > 1 and types.issubset(CASTABLE)


def _name(fn: Function) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
