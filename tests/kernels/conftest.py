"""Every test of the kernels runs on every backend that there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from amp_engine import kernels
from amp_engine.kernels import _native, choice, reference_walks, walk
from amp_engine.kernels.backend import Walks

WALKS = [name for name in vars(Walks) if not name.startswith("_")]


@pytest.fixture(params=["reference", "native"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(choice, "_NATIVE", {})
        monkeypatch.setattr(kernels, "stamps", reference_walks.stamps)
        for name in WALKS:
            monkeypatch.setattr(walk, name, getattr(reference_walks, name))
    elif _native.module is None:
        pytest.skip(f"no native kernels: {_native.reason}")
    return request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
