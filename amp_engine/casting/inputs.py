"""Casts the inputs of a model, but for arguments that are left alone, and warns where the cast loses what they say."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_engine.casting import in_force
from amp_engine.errors import AmpWarning
from amp_engine.ground.callers import warn
from amp_engine.ground.containers import cast_tensors, map_tensors
from amp_engine.ground.devices import HostNumbers, is_capturing
from amp_engine.ground.dtypes import LOW_PRECISION, dtype_name
from amp_engine.ground.torch_private import current_dispatch_mode, functorch_level

CALLS = 3
"""Calls of each class whose casts are looked at."""

_LOST = (
    "changed whole numbers: {dtype} holds them up to {whole}",
    "made distinct values equal: they lie closer together than numbers in {dtype} do",
)


class Arguments(NamedTuple):
    """The arguments of a forward.

    Attributes:
        class_name: of the module.
        positional: their names, without `self`.
    """

    class_name: str
    positional: tuple[str, ...]

    @classmethod
    def of_class(cls, kind: type) -> Arguments:
        """Read the signature of a class's forward. One that has no signature has no names."""
        return cls(kind.__name__, _positional(kind.forward)[1:])  # type: ignore[attr-defined]

    @classmethod
    def of_module(cls, module: nn.Module) -> Arguments:
        """Read the signature of a module's forward, which may be its own attribute."""
        return cls(type(module).__name__, _positional(module.forward))

    def names(self, count: int) -> list[str]:
        """Return names for so many positional arguments; what has none is called args[0] and so on."""
        return [*self.positional[:count], *(f"args[{i}]" for i in range(count - len(self.positional)))]


def _positional(forward: Callable[..., Any]) -> tuple[str, ...]:
    parameters: list[inspect.Parameter] = []
    with suppress(TypeError, ValueError):
        parameters += inspect.signature(forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


class Inputs:
    """The casts of one model's inputs. Copies and pickles of it look at inputs anew.

    Args:
        left_alone: names of arguments of the forward that are not cast; None: all are left alone.
    """

    def __init__(self, left_alone: frozenset[str] | None = frozenset()) -> None:
        self.left_alone = left_alone
        self._looked: dict[Arguments, int] = {}  # the number of calls whose casts were looked at
        self._is_quiet = False
        self._sent: list[tuple[str, Arguments, torch.dtype, HostNumbers]] = []
        self.said: dict[tuple[Arguments, str], str] = {}  # by argument: a sentence, without its end

    def __reduce__(self) -> tuple[type[Inputs], tuple[frozenset[str] | None]]:
        return Inputs, (self.left_alone,)

    def be_quiet(self) -> None:
        """Look at no cast, and warn of none."""
        self._is_quiet = True

    def cast(
        self, dtype: torch.dtype, of: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast the floating arguments of a forward to `dtype`. No host sync."""
        if self.left_alone is None:
            return args, kwargs
        looks = not torch.compiler.is_compiling() and self._looks_at(of, dtype)
        if not (looks or self.left_alone):
            return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
        names = [*of.names(len(args)), *kwargs]
        given = [*args, *kwargs.values()]
        cast = [
            one if name in self.left_alone else cast_tensors(one, dtype) for name, one in zip(names, given, strict=True)
        ]
        if looks:
            for name, new, old in zip(names, cast, given, strict=True):
                if new is not old:
                    self._look(name, of, dtype, old)
            self._warn_of_arrived()
        return tuple(cast[: len(args)]), dict(zip(kwargs, cast[len(args) :], strict=True))

    def _looks_at(self, of: Arguments, dtype: torch.dtype) -> bool:
        if self._sent:
            self._warn_of_arrived()
        looked = self._looked.get(of, 0)
        if looked >= CALLS or self._is_quiet or dtype not in LOW_PRECISION:
            return False
        if current_dispatch_mode() is not None or in_force.current() is not None:  # which would see what we do
            return False
        self._looked[of] = looked + 1
        return True

    def _look(self, name: str, of: Arguments, dtype: torch.dtype, value: Any) -> None:
        for tensor in floats_in(value):
            if tensor.dtype not in LOW_PRECISION and _is_readable(tensor):
                self._sent.append((name, of, dtype, HostNumbers(lost(tensor, dtype))))

    def _warn_of_arrived(self) -> None:
        """Warn, once by argument, of the casts whose flags have come to the host."""
        arrived = [one for one in self._sent if one[-1].is_known()]
        for one in arrived:
            self._sent.remove(one)
            name, of, dtype, flags = one
            if any(flags.values or ()) and (of, name) not in self.said:
                self.said[of, name] = said = _said(name, of, dtype, [flag != 0 for flag in flags.values or ()])
                warn(
                    f"{said[0].upper()}{said[1:]}.  Pass cast_inputs=[{name!r}] to amp.initialize, which leaves it "
                    "alone; where a layer takes it as it is, keep that layer in FP32 as well, by "
                    "amp.keep_float(layer) before amp.initialize.",
                    AmpWarning,
                )


def lost(given: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a cast to `dtype` loses, as flags: whole numbers, distinct values. float32, shape [2].

    Values are compared by column, the last dimension, where there are four rows or more, else all of them. Distinct
    values count in a column within four spacings of `dtype`, of which the cast leaves less than two bits, and where one
    number tells up to 1024 rows apart: shape [n] or [n, 1]. Differences of FP32's own rounding do not count. Looks at
    4096 rows. No host sync.
    """
    with torch.no_grad():
        rows = given.detach().reshape(-1, given.shape[-1]) if given.dim() > 1 else given.detach().reshape(-1, 1)
        rows = (rows if len(rows) >= 4 else rows.reshape(-1, 1))[:4096]
        cast = rows.to(dtype).to(rows.dtype)
        high, low = rows.amax(0), rows.amin(0)
        most, spread = torch.maximum(high.abs(), low.abs()), high - low
        is_whole = (rows == rows.round()).all(0) & (most <= 2.0**24)
        whole = is_whole & (rows != cast).any(0)
        order = rows.sort(0).values
        rounded = order.to(dtype)
        merges = ((order[1:] != order[:-1]) & (rounded[1:] == rounded[:-1])).any(0)
        is_narrow = (spread < 4 * torch.finfo(dtype).eps * most) | (cast.amax(0) == cast.amin(0))
        is_noise = spread <= 16 * torch.finfo(torch.float32).eps * most
        is_only = given.dim() == 1 or (given.dim() == 2 and given.shape[1] == 1)
        if is_only and len(rows) <= 1024:
            is_narrow = torch.ones_like(merges)
        return torch.stack([whole.any(), (merges & is_narrow & ~is_noise).any()]).float()


def floats_in(value: Any) -> list[Tensor]:
    """Return the floating tensors in an argument."""
    found: list[Tensor] = []

    def note(one: Any) -> Any:
        if isinstance(one, Tensor) and one.is_floating_point():
            found.append(one)
        return one

    map_tensors(value, note)
    return found


def _is_readable(tensor: Tensor) -> bool:
    """True for plain tensors with values that can be looked at now."""
    return (
        type(tensor) is Tensor
        and not (torch.jit.is_tracing() or is_capturing(tensor.device))  # type: ignore[attr-defined]
        and functorch_level() is None
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested)
        and tensor.numel() > 0
    )


def _said(name: str, of: Arguments, dtype: torch.dtype, flags: list[bool]) -> str:
    info = torch.finfo(dtype)
    facts = {"dtype": dtype_name(dtype), "whole": int(2 / info.eps)}
    found = " and ".join(text.format(**facts) for text, flag in zip(_LOST, flags, strict=True) if flag)
    return f"the cast of the argument {name!r} of {of.class_name} to {dtype_name(dtype)} {found}"
