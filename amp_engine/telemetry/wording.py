"""The words that a receipt is written in, as text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from amp_engine.telemetry.records import Kept, Loss, Op, Phase, Shape, Stepped

SHAPES_FINE = "Every dimension is a multiple of 8."
SHAPES_NONE = "No module that is looked at computes a matrix product in half."
SHAPES_RULE = (
    "Tensor cores want the dimensions of matrix products in float16 and bfloat16 in multiples of 8.  Pad these, if the "
    'model is yours to change (NVIDIA, "Train With Mixed Precision"):'
)
NO_LOSS = "No loss is scaled."
NO_OPTIMIZER = "No optimizer was passed to amp.initialize."
NO_TIMES = (
    "Not measured.  Type:  with amp.step_times() as times: ...  around some iterations, then amp.receipt(times=times)."
)
NO_GRADIENTS = (
    "Not measured.  Type:  gradients = amp.gradient_histogram(lambda: loss_fn(model(x), y)),  then "
    "amp.receipt(gradients=gradients)."
)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def number(value: int) -> str:
    """1,234,567."""
    return f"{value:,}"


def size(count: int) -> str:
    """A number of bytes in the unit that leaves up to four digits before the point."""
    value, unit = float(count), 0
    while value >= 10_000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:,.1f} {_UNITS[unit]}"


def percent(share: float) -> str:
    """Of 0 to 1."""
    return f"{100 * share:.1f} %"


def seconds(phase: Phase) -> list[str]:
    """On the host, and on the device where that was measured."""
    found = [phase.host_seconds] if phase.device_seconds is None else [phase.host_seconds, phase.device_seconds]
    return [f"{one:.3g} s" for one in found]


def scale(value: float) -> str:
    """A loss scale: 65536, 0.125."""
    return f"{value:.10g}"


def plural(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def grouped(kept: Sequence[Kept]) -> list[tuple[Kept, list[Kept]]]:
    """What is kept for one reason, in one type, of modules of one class: its sum, and the modules."""

    def key(one: Kept) -> tuple[str, str, str]:
        return one.why, one.class_name, one.dtype or ""

    result = []
    for _, group in groupby(sorted(kept, key=key), key):
        found = list(group)
        tensors, elements = (sum(getattr(one, name) for one in found) for name in ("tensors", "elements"))
        first = found[0]
        result.append((Kept(first.module, first.class_name, first.dtype, tensors, elements, first.why), found))
    return result


def shapes(found: Sequence[Shape]) -> list[tuple[Shape, list[str]]]:
    """Dimensions of one size in modules of one class, the first of them, and the names of all."""
    groups: dict[tuple[str, str, int], list[Shape]] = {}
    for one in found:
        groups.setdefault((one.class_name, one.dimension, one.size), []).append(one)
    return [(group[0], [module(one.module) for one in group]) for group in groups.values()]


def module(name: str) -> str:
    """The name of a module; the model itself has none."""
    return name or "(the model itself)"


def some(names: Sequence[str], most: int = 4) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def op_table(ops: Sequence[Op]) -> tuple[list[str], list[list[str]]]:
    """Function x type: how often each function ran in each type; casts and bytes of all types. Head and rows.

    Ordered as `explanation.records`: most bytes first. The last row is the total.
    """
    dtypes = sorted({op.dtype or "-" for op in ops}, key=lambda name: (name == "-", name))
    by_function: dict[tuple[str, str], list[Op]] = {}
    for op in ops:
        by_function.setdefault((op.function, op.listed), []).append(op)

    def cells(found: Sequence[Op]) -> list[str]:
        calls = [sum(op.calls for op in found if (op.dtype or "-") == dtype) for dtype in dtypes]
        sums = [sum(getattr(op, name) for op in found) for name in ("casts", "cached", "bytes_moved")]
        return [number(count) if count else "" for count in calls] + [number(one) for one in sums]

    ordered = sorted(by_function.items(), key=lambda item: -sum(op.bytes_moved for op in item[1]))
    rows = [[function, listed, *cells(found)] for (function, listed), found in ordered]
    return ["function", "list", *dtypes, "casts", "cached", "bytes moved"], [*rows, ["total", "", *cells(ops)]]


def loss(one: Loss) -> str:
    """A sentence about a loss scaler."""
    kind = "dynamic" if one.dynamic else "static"
    if one.backwards == 0:
        looked = "no backward was looked at for overflows"
    else:
        share = f" ({percent(one.overflows / one.backwards)})" if one.overflows else ""
        seen = "" if one.dynamic else " that were looked at"
        looked = f"{number(one.overflows)} of {plural(one.backwards, 'backward')}{seen} overflowed{share}"
    return f"loss_id {one.loss_id}: {kind}, now {scale(one.scale)}; {looked}"


def stepped(one: Stepped) -> str:
    """Steps and skips of an optimizer."""
    row = f", the last {one.skips_in_a_row} in a row" if one.skips_in_a_row > 1 else ""
    return f"{number(one.skips)} of {plural(one.steps, 'step')} skipped{row}"
