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
from amp_engine.ground.distributed import is_sharded
from amp_engine.ground.dtypes import dtype_name, is_low_precision
from amp_engine.ground.torch_private import data_address
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
    """What other code wrote into parameters of one model that no optimizer steps, before its first forwards."""

    def __init__(self) -> None:
        self.forwards = 64  # how many are looked at
        self.writes = 0  # forwards before which parameters were written
        self.marks: dict[int, tuple[int, int]] = {}  # version and address of each parameter, by its id


_WRITES: weakref.WeakKeyDictionary[nn.Module, _Writes] = weakref.WeakKeyDictionary()


def look_at_writes(model: nn.Module) -> None:
    """Have `note_writes`, a forward pre-hook of a model that was cast, look at its next forwards."""
    _WRITES[model] = _Writes()


def note_writes(model: nn.Module, args: object) -> None:
    """Warn at the fourth forward before which low-precision parameters were written that no optimizer steps.

    Where these follow other weights, as a momentum encoder does, or are stepped by hand, rounding loses small updates.
    A write through `.data` in place leaves no trace. Does nothing in a compiled graph. No host sync.
    """
    if torch.compiler.is_compiling() or (noted := _WRITES.get(model)) is None:
        return
    written, marks = [], {}
    for name, p in model.named_parameters():
        if is_low_precision(p) and not is_sharded(p) and next(exact_of(p), None) is None:
            marks[id(p)] = mark = p._version, data_address(p)
            if noted.marks.get(id(p), mark) != mark:
                written.append((name, p.dtype))
    noted.marks = marks
    noted.writes += bool(written)
    noted.forwards -= 1
    if noted.writes == 4:
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        name, dtype = written[0]
        warn(
            f"{name}{more} of {type(model).__name__} were written before 4 forwards, in {dtype_name(dtype)}, and no "
            "optimizer steps them: updates that are smaller than such a parameter can hold are lost.  A model that "
            "follows another's weights: leave it out of amp.initialize, in FP32, and feed it from "
            "amp.master_params(optimizer).  A step by hand: use an optimizer, or opt_level='O4'.  This is said once.",
            AmpWarning,
        )
    if noted.writes == 4 or noted.forwards == 0:
        del _WRITES[model]


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
