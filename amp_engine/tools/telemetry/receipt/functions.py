"""The section about patched functions: their lists, and the types that calls ran in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from amp_engine.casting import FunctionCasts
from amp_engine.engine import Engine
from amp_engine.ground.dtypes import dtype_name
from amp_engine.tools.explanation import Explanation, Record, type_name
from amp_engine.tools.page.page import Block, Section, Sentence, Table, Verbatim
from amp_engine.tools.telemetry.wording import number


@dataclass(frozen=True)
class Functions:
    """The patched functions.

    Attributes:
        dtype: type in which functions on the list "half" run; None if no function is cast.
        changes: the functions that users added and removed, in words.
        ops: calls by function and type, as `amp.explain()` counted them; None if no explanation was given.
        note: why there are no casts, or how to get `ops`; "" if neither applies.
    """

    dtype: str | None
    changes: tuple[str, ...]
    ops: tuple[Record, ...] | None
    note: str


NONE = Functions(None, (), None, "")

_HOW_TO_EXPLAIN = (
    "What ran in which type was not collected.  Type:\n\n    with amp.explain() as explanation:\n"
    "        ...  # one iteration\n    print(amp.receipt(explanation))"
)


def described(engine: Engine, explanation: Explanation | None) -> Functions:
    """The patched functions, and the calls that an explanation counted. Changes nothing. No host sync."""
    casts = engine.function_casts.casts
    why_not = engine.function_casts.why_nothing_is_cast(engine.policy)
    ops, note = None, why_not or ""
    if explanation is not None:
        ops = tuple(explanation.records)
        note = str(explanation) if not ops else ""
    elif why_not is None:
        note = _HOW_TO_EXPLAIN
    if casts is None:
        return Functions(None, (), ops, note)
    return Functions(dtype_name(casts.dtype), tuple(_changes(casts)), ops, note)


def section(functions: Functions) -> Section:
    """The user's changes to the lists, and the calls."""
    return Section("Functions", list(_blocks(functions)))


def _blocks(functions: Functions) -> Iterator[Block]:
    if functions.dtype is not None:
        yield Sentence(f"cast to {functions.dtype} and float32")
    yield from map(Sentence, functions.changes)
    if functions.note:
        yield Verbatim(functions.note) if "\n" in functions.note else Sentence(functions.note, "soft")
    if functions.ops:
        yield _table(functions.ops)


def _table(ops: Sequence[Record]) -> Table:
    """Rows are functions, the most bytes first; columns are calls in each type, and sums of casts and bytes."""
    dtypes = sorted({type_name(op.dtype) for op in ops}, key=lambda name: (name == "-", name))
    by_function: dict[tuple[str, str], list[Record]] = {}
    for op in ops:
        by_function.setdefault((op.function, op.listed), []).append(op)

    def cells(found: Sequence[Record]) -> list[str]:
        calls = [sum(op.calls for op in found if type_name(op.dtype) == dtype) for dtype in dtypes]
        sums = [sum(getattr(op, name) for op in found) for name in ("casts", "cached", "bytes_moved")]
        return [number(count) if count else "" for count in calls] + [number(one) for one in sums]

    ordered = sorted(by_function.items(), key=lambda item: -sum(op.bytes_moved for op in item[1]))
    rows = [[function, listed, *cells(found)] for (function, listed), found in ordered]
    head = ["function", "list", *dtypes, "casts", "cached", "bytes moved"]
    return Table([*rows, ["total", "", *cells(ops)]], head, range(2, len(head)), has_total=True)


def _changes(casts: FunctionCasts) -> Iterator[str]:
    for r in casts.registrations:
        yield f"registered as {r.kind}: {_owner(r.module)}.{r.name}"
    for owner, name in casts.removals:
        yield f"taken off its list: {_owner(owner)}.{name}"


def _owner(owner: Any) -> str:
    return str(getattr(owner, "__name__", type(owner).__name__))
