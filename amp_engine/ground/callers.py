"""Who called: the line of the user's own code, at which warnings point, and the trainer that runs the loop."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType

_TRAINERS = {
    "accelerate": "accelerator.prepare()",
    "fastai": "the Learner is made",
    "ignite": "the Engine is made",
    "lightning": "the Trainer is made",
    "lightning_fabric": "fabric.setup()",
    "monai": "the trainer is made",
    "pytorch_lightning": "the Trainer is made",
    "sentence_transformers": "the Trainer is made",
    "skorch": "the net is made",
    "transformers": "the Trainer is made",
    "trl": "the Trainer is made",
}
_BETWEEN = {"amp_engine", "torch", "contextlib", "copy", "functools", "importlib", "runpy"}


def warn(text: str, category: type[Warning], frame: FrameType | None = None) -> None:
    """Warn at the line of `frame`; by default at that of the innermost frame outside of amp_engine and torch."""
    frame = frame or _users_frame()
    names = frame.f_globals
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        names.get("__name__"),
        names.setdefault("__warningregistry__", {}),
    )


def before_what() -> str:
    """Return what a trainer that is running calls or makes first, after "before"; "" in a loop of the user's own."""
    found = [_package(frame) for frame in _stack()]
    return next((_TRAINERS[one] for one in reversed(found) if one in _TRAINERS), "")


def is_called_by(module: str) -> bool:
    """True if a function of the module of this name is on the stack."""
    return any(frame.f_globals.get("__name__") == module for frame in _stack())


def _users_frame() -> FrameType:
    frames = list(_stack())
    return next((frame for frame in frames if _package(frame) not in _BETWEEN | {*_TRAINERS}), frames[-1])


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
