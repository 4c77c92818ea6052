"""Which tests `--variants` runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import evenly_spread


def item(nodeid: str, is_whole: bool = False) -> Any:
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: name if is_whole else None)


@pytest.mark.parametrize(
    ("count", "limit", "expected"),
    [(1, 3, [0]), (3, 3, [0, 1, 2]), (4, 3, [0, 1, 2]), (9, 3, [0, 3, 6]), (11, 3, [0, 3, 7]), (5, 1, [0])],
)
def test_the_first_variant_is_run_and_others_at_equal_distances(count: int, limit: int, expected: list[int]) -> None:
    items = [item(f"a.py::test[{i}]") for i in range(count)]
    assert list(evenly_spread(items, limit)) == [items[i] for i in expected]


def test_every_test_is_run_and_is_one_of_its_file() -> None:
    items = [item("a.py::one"), *(item(f"{file}.py::two[{i}]") for file in "ab" for i in range(4))]
    assert [one.nodeid for one in evenly_spread(items, 2)] == [
        "a.py::one",
        "a.py::two[0]",
        "a.py::two[2]",
        "b.py::two[0]",
        "b.py::two[2]",
    ]


def test_of_a_test_that_asks_another_thing_with_each_variant_none_is_left_out() -> None:
    items = [item(f"a.py::test[{i}]", is_whole=True) for i in range(5)]
    assert list(evenly_spread(items, 2)) == items
