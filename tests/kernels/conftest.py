"""A test of the kernels runs on every backend that there is: compiled, and plain PyTorch, which takes no steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from amp_engine.kernels import _native, choice, reference_tensor_lists, tensor_lists
from amp_engine.kernels.backend import TensorLists

TENSOR_LISTS = [name for name in vars(TensorLists) if not name.startswith("_")]


NATIVE = pytest.mark.parametrize("backend", ["native"], indirect=True)


@pytest.fixture(params=["plain"] if _native.module is None else ["plain", "native"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        for device in [*choice.NATIVE]:
            monkeypatch.delitem(choice.NATIVE, device)
        for name in TENSOR_LISTS:
            monkeypatch.setattr(tensor_lists, name, getattr(reference_tensor_lists, name))
    elif _native.module is None:
        pytest.skip(f"no native kernels: {_native.reason}")
    return request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
