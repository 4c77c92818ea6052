"""Casts in both low-precision types, installed for the length of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from amp_engine.casting import FunctionCasts, function_casts


@pytest.fixture
def native() -> bool:
    """True if the compiled wrappers cast. With AMP_ENGINE_BUILD=none the same tests run over those of Python."""
    return function_casts.CASTS is not None


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
