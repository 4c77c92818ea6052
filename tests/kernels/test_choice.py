"""The backend is chosen by the device."""

from types import SimpleNamespace

import pytest
import torch

from amp_engine import kernels
from amp_engine.kernels import _native, choice, tensor_lists

from .conftest import TENSOR_LISTS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("module", "computed"),
    [
        (None, (False, False)),
        (SimpleNamespace(has_cuda=False), (True, False)),
        (SimpleNamespace(has_cuda=True), (True, True)),
    ],
    ids=["nothing", "cpu", "cuda"],
)
def test_kernels_are_there_where_they_are_compiled(monkeypatch, module, computed):
    for device in ("cpu", "cuda"):
        monkeypatch.delitem(choice.NATIVE, device, raising=False)
    for device, native in choice.native_by_device(module).items():
        monkeypatch.setitem(choice.NATIVE, device, native)
    assert (kernels.has_native(CPU), kernels.has_native(CUDA)) == computed
    assert not kernels.has_native(torch.device("meta"))


def test_every_test_runs_on_the_backend_that_it_asks_for(backend):
    assert kernels.has_native(CPU) == (backend == "native")
    for name in TENSOR_LISTS:
        is_reference = (
            getattr(getattr(tensor_lists, name), "__module__", None) == "amp_engine.kernels.reference_tensor_lists"
        )
        assert is_reference == (backend == "plain"), name


def test_tensor_lists_are_the_native_functions(backend):
    if backend == "native":
        for name in TENSOR_LISTS:
            assert getattr(tensor_lists, name) is getattr(_native.module, name)
