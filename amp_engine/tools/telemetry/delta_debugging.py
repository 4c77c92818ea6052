"""Find a small part of a list that fulfils a condition, by trying parts of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def reduced(items: Sequence[T], is_enough: Callable[[Sequence[T]], bool]) -> list[T]:
    """A part of `items` that is enough, but no longer enough if any single item is left out.

    The algorithm ddmin: A. Zeller and R. Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE
    Transactions on Software Engineering 28(2), 2002, figure 3. Its result is 1-minimal in their terms, after at most
    n**2 + 3n trials of n items, and about log2(n) if one item is enough. Another part that is enough may be smaller.

    Args:
        items: known to be enough.
        is_enough: True for a part that is enough. Never called with the empty part; may be called twice with others.
    """
    left = list(items)
    parts = 2
    while len(left) > 1:
        chunks = _split(left, parts)
        smaller = next((chunk for chunk in chunks if is_enough(chunk)), None)
        if smaller is not None:
            left, parts = smaller, 2
            continue
        complements = [[item for other in chunks if other is not chunk for item in other] for chunk in chunks]
        smaller = next((complement for complement in complements if is_enough(complement)), None)
        if smaller is not None:
            left, parts = smaller, max(parts - 1, 2)
        elif parts < len(left):
            parts = min(len(left), 2 * parts)
        else:
            break
    return left


def _split(items: Sequence[T], parts: int) -> list[list[T]]:
    """Split `items` into `parts` lists whose lengths differ by at most one."""
    bounds = [len(items) * i // parts for i in range(parts + 1)]
    return [list(items[low:high]) for low, high in zip(bounds, bounds[1:], strict=False)]
