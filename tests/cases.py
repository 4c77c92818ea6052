"""Few of a test's cases: that together have each value of its parameters, or each pair of values; or one."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest

# How many values of one case, each of another parameter, some case that is run has together.
TOGETHER = {"one": 0, "values": 1, "pairs": 2}
# They differ in the half type alone, for which other tests are there: in a pair the second stands for the first.
TWINS = {"O4": "O1", "O5": "O2"}


def chosen(items: list[pytest.Item], together: int) -> list[pytest.Item]:
    """The cases to run of all tests, in their order: pytest has put those side by side that share a fixture."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if together == 0:  # by its name, so that tests of the same parameters run in all of their cases between them
        few = [cases[crc32(name.encode()) % len(cases)] for name, cases in tests.items()]
    else:
        few = [item for cases in tests.values() for item in covering(cases, together)]
    names = {item.nodeid for item in few}
    return [item for item in items if item.nodeid in names]


def covering(cases: list[pytest.Item], together: int) -> list[pytest.Item]:
    """Cases of one test that cover what all of them cover; at each choice the first of those that add most to it."""
    covers = [covered(getattr(case, "callspec", None), together) for case in cases]
    missing, places = set().union(*covers), []
    while missing or not places:
        places.append(max(range(len(cases)), key=lambda place: len(covers[place] & missing)))
        missing -= covers[places[-1]]
    return [cases[place] for place in sorted(places)]


def covered(callspec: Any, together: int) -> set[Hashable]:
    """The values of a case's parameters, and their combinations where several are to come together."""
    values = sorted(callspec.params.items()) if callspec else []
    # By identity: 0.0 and -0.0 are equal, and so are 1 and True.
    single = {(name, id(value)) for name, value in values}
    in_pairs = [(name, TWINS.get(value, value) if isinstance(value, str) else id(value)) for name, value in values]
    return single | {names for count in range(2, together + 1) for names in combinations(in_pairs, count)}
