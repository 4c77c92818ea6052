"""What a patched function does: look at its tensor arguments, cast, call on.

As in apex only arguments at the top level are looked at, and lists and tuples of tensors among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from amp_engine.casting.cache import WeightCache

F = TypeVar("F", bound=Callable[..., Any])

_LOW = (torch.float16, torch.bfloat16)
_CASTABLE = (*_LOW, torch.float32)  # float64 and integers are never touched

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

    def trace(self, source: torch.dtype, target: torch.dtype, function: str) -> None:
        """Told of each cast, for verbose output."""


Convert = Callable[[Tensor], Tensor]
Wrapper = Callable[[Callable[..., Any], Casts], Callable[..., Any]]


def half(fn: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """Floating arguments in the low-precision type; weights through the cache."""
    to_half = _to_half(casts, fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not casts.is_active:
            return fn(*args, **kwargs)
        return fn(*_each(args, to_half), **_each_keyword(kwargs, to_half))

    return wrapper


def float32(fn: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """Low-precision arguments in float32."""
    to_float = _to_float(casts, fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not casts.is_active:
            return fn(*args, **kwargs)
        return fn(*_each(args, to_float), **_each_keyword(kwargs, to_float))

    return wrapper


def promote(fn: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """Arguments in float32 where it meets low precision, 0-dim tensors included.

    torch itself would let a half tensor decide over a 0-dim float32 one. Mixes with float64 are torch's.
    """
    to_float = _to_float(casts, fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not casts.is_active or not _mixed(_tensors((*args, *kwargs.values()))):
            return fn(*args, **kwargs)
        return fn(*_each(args, to_float), **_each_keyword(kwargs, to_float))

    return wrapper


def match_self(fn: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """Of an in-place method: the other arguments in the type of the tensor written to."""

    @functools.wraps(fn)
    def wrapper(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not casts.is_active or self.dtype not in _CASTABLE:
            return fn(self, *args, **kwargs)
        to_self = _to(self.dtype, casts, fn)
        return fn(self, *_each(args, to_self), **_each_keyword(kwargs, to_self))

    return wrapper


def refused_in_place(kind: str) -> Wrapper:
    """Of an in-place function ("function") or method ("method"): an error where float16 would lose range."""

    def wrap(fn: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
        to_float = _to_float(casts, fn)

        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not casts.is_active:
                return fn(*args, **kwargs)
            if kind == "function" and any(t.dtype is torch.float16 for t in _tensors((*args, *kwargs.values()))):
                raise NotImplementedError(
                    f"Cannot call in-place function {fn.__name__} with fp16 arguments.  Type "
                    f"{fn.__name__.rstrip('_')}(...) instead, which runs in FP32."
                )
            written = args[0] if args else None
            if isinstance(written, Tensor) and written.dtype is torch.float16:
                raise NotImplementedError(
                    f"Cannot call in-place method {fn.__name__} on fp16 Tensors.  Type "
                    f".{fn.__name__.rstrip('_')}(...) instead, which runs in FP32."
                )
            if not isinstance(written, Tensor) or written.dtype is not torch.float32:
                return fn(*args, **kwargs)
            return fn(written, *_each(args[1:], to_float), **_each_keyword(kwargs, to_float))

        return wrapper

    return wrap


def banned(fn: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """Of binary_cross_entropy: an error on float16 unless allowed, float32 otherwise."""
    to_float = _to_float(casts, fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not casts.is_active:
            return fn(*args, **kwargs)
        tensors = _tensors((*args, *kwargs.values()))
        if not casts.allow_banned and any(t.dtype is torch.float16 for t in tensors):
            raise NotImplementedError(_BANNED)
        return fn(*_each(args, to_float), **_each_keyword(kwargs, to_float))

    return wrapper


REGISTERED: dict[str, Wrapper] = {"half": half, "float": float32, "promote": promote}


def deferred(kind: str, fn: F, current: Callable[[], Casts | None]) -> F:
    """`fn`, cast as `kind` ("half", "float", "promote") says by the casts that are current when it is called."""
    wrap = REGISTERED[kind]

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        casts = current()
        if casts is None or not casts.is_active:
            return fn(*args, **kwargs)
        return wrap(fn, casts)(*args, **kwargs)

    return cast("F", wrapper)


def _to_half(casts: Casts, fn: Callable[..., Any]) -> Convert:
    plain = _to(casts.dtype, casts, fn)
    name = _name(fn)

    def convert(tensor: Tensor) -> Tensor:
        if casts.enable_caching and type(tensor) is nn.Parameter and tensor.dtype is torch.float32:
            return casts.cache.cast(tensor, casts.dtype, lambda: casts.trace(torch.float32, casts.dtype, name))
        return plain(tensor)

    return convert


def _to_float(casts: Casts, fn: Callable[..., Any]) -> Convert:
    return _to(torch.float32, casts, fn)


def _to(dtype: torch.dtype, casts: Casts, fn: Callable[..., Any]) -> Convert:
    name = _name(fn)

    def convert(tensor: Tensor) -> Tensor:
        if tensor.dtype is dtype or tensor.dtype not in _CASTABLE:
            return tensor
        casts.trace(tensor.dtype, dtype, name)
        return tensor.to(dtype)

    return convert


def _each(values: Iterable[Any], convert: Convert) -> list[Any]:
    return [_convert(value, convert) for value in values]


def _each_keyword(kwargs: dict[str, Any], convert: Convert) -> dict[str, Any]:
    return {key: _convert(value, convert) for key, value in kwargs.items()} if kwargs else kwargs


def _convert(value: Any, convert: Convert) -> Any:
    if isinstance(value, Tensor):
        return convert(value)
    if _is_tensor_sequence(value):
        items = [convert(item) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def _is_tensor_sequence(value: Any) -> bool:
    """Whether every element is a floating tensor and at least one is of a type that is cast."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(item, Tensor) and item.is_floating_point() for item in value)
        and any(item.dtype in _CASTABLE for item in value)
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def _mixed(tensors: Iterable[Tensor]) -> bool:
    """Whether low precision meets another of the types that are cast, and float64 is not among them."""
    types = {t.dtype for t in tensors if t.is_floating_point()}
    return len(types) > 1 and types.issubset(_CASTABLE)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
