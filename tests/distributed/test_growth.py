"""docs/how_it_grows.md: what was counted, that the model says the same, and that the page has both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.ranks import CASES, Step, modelled, modelled_table, steps
from tests.ranks import on_ranks

PAGE = Path(__file__).parents[2] / "docs/how_it_grows.md"


@pytest.fixture(scope="module", params=[2, 4])
def counted(request: pytest.FixtureRequest) -> tuple[int, dict[tuple[str, str], Step]]:
    results = on_ranks(steps, request.param)
    assert all(result == results[0] for result in results)
    return request.param, {case: Step(*values) for case, values in results[0].items()}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_what_is_counted_is_what_is_modelled_and_written(
    counted: tuple[int, dict[tuple[str, str], Step]], case: tuple[str, str]
) -> None:
    ranks, results = counted
    step = results[case]
    sent, kept = modelled(*case, ranks)
    agreement = 2 * 16 * (ranks - 1) / step.params if case[1] == "O2" else 0.0
    assert step.link_bytes(ranks) == pytest.approx(sent + agreement)
    assert step.kept / step.params == kept
    kind, level = case
    row = f"| {ranks} | {kind} | {level} | {len(step.sent)} | {sent:.2f} | {kept:.2f} |"
    assert row in PAGE.read_text().splitlines()
    assert step.sent.count(("c10d::allreduce_", 16 * ranks)) == (level == "O2")


def test_the_page_has_what_is_modelled() -> None:
    lines = PAGE.read_text().splitlines()
    assert all(row in lines for row in modelled_table())
