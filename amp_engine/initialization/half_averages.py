"""Warn of code that averages weights in low precision, or steps them by hand."""

from __future__ import annotations

import linecache
import re
import sys
import weakref
from collections.abc import Iterator
from types import FrameType

import torch
from torch import nn

from amp_engine.errors import AmpWarning
from amp_engine.ground.callers import warn
from amp_engine.ground.dtypes import dtype_name, is_low_precision
from amp_engine.stepping.beside import Beside
from amp_engine.stepping.exact import exact_of

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
        "masters type averaged = amp.averaged_model(model, optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.9999)) and "
        "averaged.update_parameters(model); a class of your own averages amp.master_params(optimizer).",
        AmpWarning,
        frame,
    )


class _Writes:
    """The first forwards of one model: which came after a write into parameters that no optimizer steps."""

    def __init__(self) -> None:
        self.forwards = 64  # how many are looked at
        self.last = 0  # a bit for each of the last 16: 1 if parameters were written before it
        self.versions: dict[int, int] = {}  # of each parameter, by its id


_WRITES: weakref.WeakKeyDictionary[nn.Module, _Writes] = weakref.WeakKeyDictionary()


def look_at_writes(model: nn.Module) -> None:
    """Have `note_writes`, a forward pre-hook of a model that was cast, look at its next forwards."""
    _WRITES[model] = _Writes()


def note_writes(model: nn.Module, args: object) -> None:
    """Warn if low-precision parameters that no optimizer steps were written before 4 of the last 16 forwards.

    Where these follow other weights, as a momentum encoder does, or are stepped by hand, rounding loses small updates.
    A write through `.data` moves no version and is not seen. Does nothing in a compiled graph. No host sync.
    """
    if torch.compiler.is_compiling() or (noted := _WRITES.get(model)) is None:
        return
    written, versions = [], {}
    for name, p in model.named_parameters():
        if is_low_precision(p) and not p.is_inference():
            one = next(exact_of(p), None)
            if isinstance(one, Beside) and one.is_owned():
                continue
            versions[id(p)] = p._version
            is_loaded = isinstance(one, Beside) and one.in_sync()
            if noted.versions.get(id(p), p._version) != p._version and not is_loaded:
                written.append((name, p.dtype))
    noted.versions = versions
    noted.forwards -= 1
    noted.last = (noted.last << 1 | bool(written)) & 0xFFFF
    is_told = bool(written) and noted.last.bit_count() >= 4
    if is_told or noted.forwards <= 0:
        _WRITES.pop(model, None)
    if is_told:
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        name, dtype = written[0]
        warn(
            f"{name}{more} of {type(model).__name__}, which no optimizer steps, were written in {dtype_name(dtype)} "
            "before 4 of its last 16 forwards: rounding loses small updates, as those of an average.  A model that "
            "follows another's weights: leave it out of amp.initialize, in FP32, and feed it from "
            "amp.master_params(optimizer).  A step by hand: use an optimizer, or opt_level='O4'.  This is said once.",
            AmpWarning,
        )


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
