"""Every test of the kernels runs on every backend that there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from amp_engine.kernels import _native


@pytest.fixture(params=["reference", "native"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(_native, "module", None)
    elif _native.module is None:
        pytest.skip(f"no native kernels: {_native.reason}")
    return request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
