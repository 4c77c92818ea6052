"""Warn of code that averages weights in low precision, steps them by hand, or steps those of a copy."""

from __future__ import annotations

import linecache
import re
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from types import FrameType

import torch
from torch import Tensor, nn

from amp_engine.errors import AmpWarning
from amp_engine.ground.callers import warn
from amp_engine.ground.devices import HostNumbers, is_capturing
from amp_engine.ground.dtypes import dtype_name, is_low_precision
from amp_engine.ground.torch_private import current_dispatch_mode, functorch_level
from amp_engine.stepping.beside import Beside
from amp_engine.stepping.exact import exact_of
from amp_engine.stepping.half_weights import note_copy

_WORDS = {"ema", "swa", "emas", "polyak", "teacher"}


def warn_of_low_precision_average(dtype: torch.dtype) -> None:
    """Warn, while a cast model is deepcopied, if the copying code names itself or the copy an average.

    Names are the only evidence: an update of the copy calls none of our code, and an update by 1e-4 that rounding
    loses leaves no trace. A copy for another purpose (the best model so far) is as good as the model: no warning.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_globals.get("__name__") == "copy" or frame.f_code.co_name == "__deepcopy__"):
        frame = frame.f_back
    if frame is None or getattr(type(frame.f_locals.get("self")), "averages_exactly", False):
        return
    if not any(map(_is_average, _names(frame))):
        return
    # Warn at the line that makes the averaging object, not inside of its class.
    while frame.f_code.co_name == "__init__" and frame.f_back is not None:
        frame = frame.f_back
    warn(
        f"A moving average of this model was made as a copy of it, whose parameters are {dtype_name(dtype)}: small "
        "updates of it are rounded away, and the average stands still.  For one in FP32 that follows the "
        "masters type averaged = amp.averaged_model(model, optimizer), with any other arguments of torch's "
        "AveragedModel, and averaged.update_parameters(model); a class of your own averages amp.named_masters(model).",
        AmpWarning,
        frame,
    )


class _Writes:
    """The first forwards of one model, and the writes before them into parameters that no optimizer steps."""

    def __init__(self) -> None:
        self.forwards = 16  # how many are looked at
        self.writes = 0  # how many of them came after a write, as far as the host knows
        self.names: list[str] = []  # of the parameters
        self.versions: list[int] = []
        self.dtype = torch.bfloat16  # theirs
        self.sample: Tensor | None = None  # some elements of each, as integers
        self.flags: deque[HostNumbers] = deque()  # 1 if the sample differed from the one before


_SAMPLE = 256  # elements of each parameter
_WRITES: weakref.WeakKeyDictionary[nn.Module, _Writes] = weakref.WeakKeyDictionary()
_CAST: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that were cast, and their copies


def look_at_writes(model: nn.Module) -> None:
    """Have `note_writes`, a forward pre-hook of a model that was cast, look at its next forwards."""
    _WRITES[model] = _Writes()
    _CAST.add(model)


def note_writes(model: nn.Module, args: object) -> None:
    """Warn if low-precision parameters that no optimizer steps were written before 3 of the first 16 forwards.

    Where these follow other weights, as a momentum encoder does, or are stepped by hand, rounding loses small updates.
    Such code writes through `.data`, so samples of the values are compared. A checkpoint that is loaded is no write.
    Of a model that is a copy, the parameters are noted for a warning when an optimizer steps them.
    Does nothing in a compiled graph, a CUDA graph, a trace, functorch or a dispatch mode. No host sync.
    """
    if torch.compiler.is_compiling():
        return
    if model not in _CAST:  # it has the hooks of the model that it is a copy of
        _CAST.add(model)
        note_copy(model)
    if (noted := _WRITES.get(model)) is None:
        return
    if functorch_level() is not None or current_dispatch_mode() is not None or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return
    params: dict[str, nn.Parameter] = {}
    versions: list[int] = []
    is_loaded = False
    for name, p in model.named_parameters():
        if is_low_precision(p) and type(p) is nn.Parameter and p.layout is torch.strided and not p.is_inference():
            one = next(exact_of(p), None)
            is_stepped = isinstance(one, Beside) and one.is_owned()
            if is_stepped or (params and _kind(p) != _kind(next(iter(params.values())))):
                continue
            was = noted.versions[len(versions)] if len(versions) < len(noted.versions) else p._version
            is_loaded |= isinstance(one, Beside) and one.in_sync() and p._version != was
            params[name] = p
            versions.append(p._version)
    if any(is_capturing(p.device) for p in [*params.values()][:1]):
        return
    noted.forwards -= 1
    is_same, noted.names, noted.versions = noted.names == [*params], [*params], versions
    if params:
        # As integers: torch.cat of floats is one of the functions that autocast casts.
        sample = torch.cat([p.detach().flatten()[:_SAMPLE].view(torch.int16) for p in params.values()])
        noted.dtype = next(iter(params.values())).dtype
        if noted.sample is not None and is_same and not is_loaded:
            noted.flags.append(HostNumbers((sample != noted.sample).any().reshape(1)))
        noted.sample = sample
    while noted.flags and noted.flags[0].is_known():
        noted.writes += int(noted.flags.popleft().read())
    if noted.writes < 3 and noted.forwards > 0:
        return
    if _WRITES.pop(model, None) is not None and noted.writes >= 3:
        of = f"{noted.names[0]} to {noted.names[-1]}, " if noted.names else ""
        warn(
            f"Parameters of {type(model).__name__} that no optimizer steps, {of}were written in "
            f"{dtype_name(noted.dtype)} before 3 of its first forwards: rounding loses small updates, as those "
            "of an average.  A model that follows another's weights: leave it out of amp.initialize, in FP32, and feed "
            "it from amp.named_masters(model).  A step by hand: use an optimizer, or opt_level='O4'.  This is said "
            "once.",
            AmpWarning,
        )


def _kind(param: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return param.dtype, param.device


def _names(frame: FrameType) -> Iterator[str]:
    """Yield the line that copies, and the names of the functions and classes around it."""
    yield linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition("#")[0]
    caller: FrameType | None = frame
    for _ in range(2):
        if caller is None:
            return
        yield caller.f_code.co_name
        if caller.f_code.co_name == "__init__":
            yield from (kind.__name__ for kind in type(caller.f_locals.get("self")).__mro__)
        caller = caller.f_back


def _is_average(text: str) -> bool:
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)
    return any(word.lower() in _WORDS or word.lower().startswith("averag") for word in words)
