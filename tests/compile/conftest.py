"""Every test here compiles: afterwards nothing compiled and no graph break is left over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def compiler(dynamo: None) -> Iterator[None]:
    counters.clear()
    yield
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    counters.clear()
