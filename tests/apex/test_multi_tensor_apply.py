"""`apex.multi_tensor_apply` and `apex_C`."""

from __future__ import annotations

import pytest
import torch

from amp_engine.apex import apex_C
from amp_engine.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from amp_engine.errors import AmpValueError


def test_the_applier_hands_its_chunk_size_on_and_returns_what_the_operation_returns():
    flag, lists = torch.zeros(1, dtype=torch.int32), [[torch.ones(2)]]
    called = []

    def op(*args):
        called.append(args)
        return "result"

    assert MultiTensorApply(4096)(op, flag, lists, 1.0, False) == "result"
    assert called == [(4096, flag, lists, 1.0, False)]


def test_the_applier_that_clients_import_is_available():
    assert MultiTensorApply.available
    assert MultiTensorApply.import_err is None
    assert multi_tensor_applier.available
    assert multi_tensor_applier.chunk_size == 65536


def test_the_class_is_found_in_the_submodule():
    from amp_engine.apex.multi_tensor_apply import multi_tensor_apply

    assert multi_tensor_apply.MultiTensorApply is MultiTensorApply


def test_flatten_copies_and_unflatten_views():
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(0), torch.randn(4)]
    flat = apex_C.flatten(tensors)
    assert torch.equal(flat, torch.cat([t.reshape(-1) for t in tensors]))
    back = apex_C.unflatten(flat, tensors)
    assert [t.shape for t in back] == [t.shape for t in tensors]
    flat.zero_()
    assert all(not t.any() for t in back)
    assert tensors[0].any()


def test_flatten_refuses_mixed_types_and_nothing():
    with pytest.raises(AmpValueError, match=r"tensors\[1\] is torch.float16 on cpu, but tensors\[0\] is torch.float32"):
        apex_C.flatten([torch.ones(2), torch.ones(2).half()])
    with pytest.raises(AmpValueError, match="there are no tensors"):
        apex_C.flatten([])


@pytest.mark.parametrize("flat", [torch.ones(5), torch.ones(7), torch.ones(2, 3)], ids=["short", "long", "2-d"])
def test_unflatten_refuses_another_number_of_elements(flat):
    with pytest.raises(AmpValueError, match="but the tensors have 6 elements together"):
        apex_C.unflatten(flat, [torch.ones(2), torch.ones(4)])
