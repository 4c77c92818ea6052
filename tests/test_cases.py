"""A parametrized test of which not all cases are run gets the right ones."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import chosen

A_LIST: list[int] = []
VALUES = {"level": ["O0", "O2", "O3"], "kind": [0.0, -0.0, 1, True], "size": [(1, 2), A_LIST, None, A_LIST.append]}


def case(nodeid: str, **params: Any) -> Any:
    return (
        SimpleNamespace(nodeid=nodeid, callspec=SimpleNamespace(params=params))
        if params
        else SimpleNamespace(nodeid=nodeid)
    )


def product_of(values: dict[str, list[Any]]) -> list[Any]:
    rows = product(*values.values())
    return [case(f"a.py::test[{place}]", **dict(zip(values, row, strict=True))) for place, row in enumerate(rows)]


def combined(cases: list[Any], count: int) -> set[Any]:
    """The places in VALUES that some case has together."""
    rows = [
        [(n, next(i for i, v in enumerate(VALUES[n]) if v is value)) for n, value in c.callspec.params.items()]
        for c in cases
    ]
    return {places for row in rows for places in combinations(row, count)}


@pytest.mark.parametrize(("together", "at_most"), [(1, 4), (2, 20)])
def test_few_cases_have_all_that_come_together(together, at_most):
    every = product_of(VALUES)
    few = chosen(every, together)
    assert combined(few, together) == combined(every, together)
    assert len(few) <= at_most < len(every) == 48


def test_the_choice_is_the_same_each_time_and_in_order():
    names = [[item.nodeid for item in chosen(product_of(VALUES), 2)] for _ in range(2)]
    assert names[0] == names[1]
    every = [item.nodeid for item in product_of(VALUES)]
    assert names[0] == sorted(names[0], key=every.index)


def test_they_are_chosen_from_what_the_command_line_leaves(request):
    called_last_first = request.config.hook.pytest_collection_modifyitems.get_hookimpls()
    places = {impl.function.__module__: place for place, impl in enumerate(called_last_first)}
    assert places["tests.conftest"] < places["_pytest.mark"]  # of -k and -m


def test_tests_without_parameters_are_run_and_each_is_one_of_its_file():
    rows = [case("a.py::one"), *(case(f"{file}.py::two[{i}]", i=i, twice=2 * i) for file in "ab" for i in range(3))]
    assert chosen(rows, 1) == rows


def test_o4_and_o5_stand_for_o1_and_o2_in_pairs_and_each_is_run():
    cases = product_of({"level": ["O1", "O2", "O4", "O5"], "kind": list(range(6))})
    few = chosen(cases, 2)
    assert len(few) == 12
    assert {item.callspec.params["level"] for item in few} == {"O1", "O2", "O4", "O5"}


def test_one_case_of_each_test_is_run_and_tests_of_the_same_parameters_run_different_ones():
    every = [case(f"a.py::test_{t}[{level}]", level=level) for t in range(40) for level in ("O1", "O2", "O5")]
    few = chosen(every, 0)
    assert [item.nodeid.partition("[")[0] for item in few] == [f"a.py::test_{t}" for t in range(40)]
    assert {item.callspec.params["level"] for item in few} == {"O1", "O2", "O5"}
    assert chosen(every, 0) == few
