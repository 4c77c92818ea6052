"""Casts in both low-precision types, installed for the length of a test, by the compiled wrappers and by Python's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from amp_engine.casting import FunctionCasts, function_casts

WRAPPERS = [True, False] if function_casts.HAS_NATIVE else [False]


@pytest.fixture(autouse=True, params=WRAPPERS, ids=lambda native: "native" if native else "python")
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the compiled wrappers cast in this test."""
    monkeypatch.setattr(function_casts, "HAS_NATIVE", request.param)
    return request.param


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def low(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def casts(low: torch.dtype) -> Iterator[FunctionCasts]:
    casts = FunctionCasts(low)
    casts.install()
    yield casts
    casts.remove()
    assert not casts.installed
