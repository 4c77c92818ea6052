"""Warn of code that copies a cast model to average it: the copy, and so the average, is low-precision."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from types import FrameType

import torch

from amp_engine.errors import AmpWarning
from amp_engine.ground.callers import warn
from amp_engine.ground.dtypes import dtype_name

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
