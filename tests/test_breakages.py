"""The pure parts of tests/breakages: what can be broken in a source, which tests run first, what a report counts."""

import ast

import pytest

from tests.breakages import breakages, mutations

SOURCE = b'''\
"""A docstring with 0."""
from __future__ import annotations

LIMIT = 1


def wanted(x: int = 1, *, table: dict[str, int]) -> int:
    """Not broken: 0, 1, True."""
    if x < 3 and not table:
        raise ValueError("is 1" if x == 1 else "is 0")
    table["a"] = x
    say(f"{x or 1} items", table)
    return table.get("a")
'''


def ways(source=SOURCE):
    return [way for _, found in mutations.Finder("amp_engine/room/file.py", source).statements() for way in found]


def test_each_way_changes_one_place_and_leaves_a_program():
    for way in ways():
        assert SOURCE[way.start : way.end].decode() == way.before != way.after
        ast.parse(way.applied(SOURCE))


def test_each_operator_has_its_place():
    assert {(way.operator, way.before, way.after) for way in ways()} == {
        ("condition negated", "x < 3 and not table", "(not (x < 3 and not table))"),
        ("and/or swapped", "x < 3 and not table", "((x < 3) or (not table))"),
        ("comparison changed", "x < 3", "((x) <= (3))"),
        ("not deleted", "not table", "(table)"),
        ("assignment dropped", 'table["a"] = x', "pass"),
        ("call dropped", 'say(f"{x or 1} items", table)', "None"),
        ("arguments swapped", 'f"{x or 1} items", table', 'table, f"{x or 1} items"'),
        ("None returned", 'table.get("a")', "None"),
        ("key changed", '"a"', "'a_'"),
    }


@pytest.mark.parametrize("moved", [b"# a line\n\n" + SOURCE, SOURCE + b"\n\ndef other():\n    return 5\n"])
def test_code_that_moves_is_broken_as_before(moved):
    def chosen(path, source):
        return {(way.name, way.operator) for way in mutations.choose({path: source}, 100)}

    assert chosen("amp_engine/file.py", SOURCE) <= chosen("amp_engine/other/room.py", moved)
    assert len(chosen("amp_engine/file.py", SOURCE)) == 4


def test_an_instrumented_source_tells_what_it_reaches_and_does_as_before():
    source = b"def total(a, b):\n    if a and not b:\n        return 0\n    a += 1\n    return a\n"
    names = [mutations.replace(way, name=str(number)) for number, way in enumerate(ways(source))]
    reached = set()
    scope = {"__reached__": reached.add}
    exec(mutations.instrumented(source, names, "import math"), scope)
    assert (scope["total"](1, 0), scope["total"](1, 1)) == (0, 2)
    assert reached == {way.name for way in names}
    reached.clear()
    assert scope["total"](1, 0) == 0
    assert reached == {way.name for way in names if way.line < 4}


def test_of_each_file_and_function_one_test_comes_first():
    seconds = {"f::a[1]": 2, "f::a[2]": 1, "f::b": 3, "g::c": 4, "g::c[2]": 5, "h::other": 0, "h::fails": 0}
    tests = {test: breakages.Record(time, {"it"}, failed=False) for test, time in seconds.items()}
    tests["h::other"].reached.clear()
    tests["h::fails"].failed = True
    assert breakages.in_order(tests, "it") == ["f::a[2]", "g::c", "f::b", "f::a[1]", "g::c[2]"]


def test_whatever_an_import_reaches_any_test_may_notice():
    tests = {"": breakages.Record(0, {"it"}, failed=False), "f::a": breakages.Record(1, set(), failed=False)}
    assert breakages.in_order(tests, "it") == ["f::a"]


def test_what_a_fixture_of_a_file_reaches_all_its_tests_may_notice():
    tests = {"f::a": breakages.Record(2, {"it"}, failed=False, shares=True)}
    tests |= {name: breakages.Record(1, set(), failed=False) for name in ("f::b", "g::c")}
    assert breakages.in_order(tests, "it") == ["f::b", "f::a"]


@pytest.mark.parametrize(
    ("status", "failed", "by"),
    [
        (0, [], ""),
        (1, ["f::b"], "f::b"),
        (None, [], "f::a (did not end)"),
        (5, [], ""),
        (-11, [], "f::a (pytest ended with -11)"),
    ],
)
def test_failures_crashes_and_hangs_are_noticed(status, failed, by):
    assert breakages.noticed(status, ["f::a"], failed) == by


def test_a_report_counts_by_room_and_leaves_out_what_is_equivalent():
    found = [mutations.replace(way, name=str(number)) for number, way in enumerate(ways()[:3])]
    results = {name: breakages.Result(name, by, 1, 1, 0.0) for name, by in (("0", "f::a"), ("1", ""), ("2", ""))}
    text = breakages.report(found, results, {"2": "nobody could"})
    assert text.splitlines()[:3] == [
        "all          noticed   1 of   2",
        "room         noticed   1 of   2",
        "equivalent   1 not counted",
    ]
