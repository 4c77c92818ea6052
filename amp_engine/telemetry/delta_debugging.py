"""The smallest part of a list that is enough for something, by trying parts of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def reduced(items: Sequence[T], is_enough: Callable[[Sequence[T]], bool]) -> list[T]:
    """A part of `items` that is enough, and that is not without any single one of its items.

    The algorithm ddmin: A. Zeller and R. Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE
    Transactions on Software Engineering 28(2), 2002, figure 3. It gives what they call 1-minimal, after at most n**2 +
    3n trials of n items, and about log2(n) where one item is enough. Another part that is enough may be smaller.

    Args:
        items: known to be enough.
        is_enough: True for a part that is enough. Never called with the empty part, and more than once with others.
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
    """`parts` lists, as long as each other or one longer."""
    bounds = [len(items) * i // parts for i in range(parts + 1)]
    return [list(items[low:high]) for low, high in zip(bounds, bounds[1:], strict=False)]
