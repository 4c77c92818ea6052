"""`amp.explain()`: which function ran in which type how often, and what the casts cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType

import torch

from amp_engine.casting import locks
from amp_engine.casting.calls import Call
from amp_engine.casting.function_casts import Observer
from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError
from amp_engine.ground.dtypes import dtype_name
from amp_engine.tools.page.page import Page, Paged, Table, Verbatim

_USE = "Type:\n\n    with amp.explain() as explanation:\n        ...  # one iteration\n    print(explanation)"


@dataclass(frozen=True)
class Record:
    """The calls of one function in one type.

    Attributes:
        function: qualified name, such as "torch.nn.functional.linear" or "torch.Tensor.softmax".
        listed: the list that the function is on: half, float, promote, match_self, refused_in_place or banned.
        dtype: the type that it ran in: the widest floating type among its arguments after casting; None if none.
        calls: number of calls.
        casts: number of tensors that were cast for it.
        cached: number of casts that the cache of weights saved.
        bytes_moved: bytes that the casts read and wrote.
    """

    function: str
    listed: str
    dtype: torch.dtype | None
    calls: int
    casts: int
    cached: int
    bytes_moved: int


class Explanation(Paged):
    """The calls of listed functions inside of `with amp.explain() as explanation:`, in all threads.

    Not counted: functions on no list, calls by an optimizer's step or the exit of `scale_loss`, and code that
    torch.compile compiled, where casts are part of the graph. `str(explanation)` is a table. Each `with` starts from
    zero. No host sync.

    Args:
        watch: returns a context in which a method, `tell`, gets each call.
    """

    def __init__(self, watch: Callable[[Observer], AbstractContextManager[None]]) -> None:
        self._watch = watch
        self._counts: dict[tuple[str, str, torch.dtype | None], list[int]] = {}
        self._open: AbstractContextManager[None] | None = None
        self._entered = False

    def __enter__(self) -> Explanation:
        if self._open is not None:
            raise AmpStateError("This explanation is being collected already.  Call amp.explain() for another one.")
        self._counts.clear()
        self._open, self._entered = self._watch(self.tell), True
        self._open.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._open is not None
        self._open.__exit__(None, None, None)
        self._open = None

    def tell(self, call: Call) -> None:
        """Count `call`, unless an optimizer's step, or amp_engine itself, made it."""
        if _is_of_a_step():
            return
        key = call.function, call.kind, call.dtype
        moved = sum(cast.bytes_moved for cast in call.casts)
        with locks.shared:
            counts = self._counts.setdefault(key, [0, 0, 0, 0])
            for i, more in enumerate((1, len(call.casts), call.cached, moved)):
                counts[i] += more

    @property
    def records(self) -> list[Record]:
        """The records so far, sorted by bytes moved, then by calls, largest first."""
        with locks.shared:
            records = [Record(*key, *counts) for key, counts in self._counts.items()]
        return sorted(records, key=lambda r: (-r.bytes_moved, -r.calls, r.function, str(r.dtype)))

    def _page(self) -> Page:
        if not self._entered:
            return Page.of(Verbatim(f"Nothing is explained yet.  {_USE}"))
        records = self.records
        if not records:
            return Page.of(Verbatim(f"No listed function was seen.  {_NOTHING_RAN}"))
        return Page.of(Table(_rows(records), _HEAD, numbers=range(3, len(_HEAD)), has_total=True))


def explain(engine: Engine) -> Explanation:
    """A record of casts, for `with amp.explain() as explanation:` around one or more iterations.

    `explanation.records` has, for each function on the lists of O1 and O4 and each type that it ran in, the calls, the
    casts made for them, the casts that the cache saved, and the bytes that the casts read and wrote. At the other
    levels there are no casts to count. Can be nested. Python runs at each call, so do not time the iterations.
    """
    return Explanation(engine.function_casts.observed)


_ROOMS = ("initialization", "kernels", "saving", "scaling", "stepping", "tools.diagnosis", "tools.telemetry")
_OURS = tuple(f"amp_engine.{room}." for room in _ROOMS)
_STEPS = ("torch.optim.optimizer", "amp_engine.optimizers.")


def _is_of_a_step() -> bool:
    """True if amp_engine or an optimizer's step made the call, outside of modules and closures with gradients on."""
    frame: FrameType | None = sys._getframe(2)
    is_in_step = not torch.is_grad_enabled()
    is_first = True  # no frame outside of torch and casting/ was seen yet
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "heard_closure":  # of stepping/records.py: what it calls is the user's
            return not torch.is_grad_enabled()
        if name == "torch.nn.modules.module" or name.startswith(_OURS):
            return name.startswith(_OURS)
        if name.startswith(_STEPS):
            return is_in_step
        if is_first and not name.startswith(("torch.", "amp_engine.casting.")):
            is_first, is_in_step = False, is_in_step or frame.f_code.co_name == "step"
        frame = frame.f_back
    return False


_HEAD = ("function", "list", "ran in", "calls", "casts", "cached", "bytes moved")


_NOTHING_RAN = (
    "None ran, or none that is seen.  Code that torch.compile compiled is not seen, nor are calls that another engine "
    "casts, nor at O1 and O4 what runs inside of amp.disable_casts() and of modules of amp.keep_float()."
)


def _rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    rows = [
        (r.function, r.listed, type_name(r.dtype), *map("{:,}".format, (r.calls, r.casts, r.cached, r.bytes_moved)))
        for r in records
    ]
    totals = [sum(getattr(r, name) for r in records) for name in ("calls", "casts", "cached", "bytes_moved")]
    return [*rows, ("total", "", "", *map("{:,}".format, totals))]


def type_name(dtype: torch.dtype | None) -> str:
    """The type's name in tables; "-" for None."""
    return "-" if dtype is None else dtype_name(dtype)
