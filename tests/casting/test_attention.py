"""Masks of torch.nn.attention.bias hold no values: only torch's attention knows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

from amp_engine.casting import FunctionCasts

MASKS = [causal_lower_right(3, 5), causal_upper_left(3, 5), causal_lower_right(5, 5)]


def arguments(mask: CausalBias) -> dict[str, Any]:
    n, m = mask.seq_len_q, mask.seq_len_kv
    return {"query": torch.randn(2, n, 4), "key": torch.randn(2, m, 4), "value": torch.randn(2, m, 4)}


@pytest.mark.parametrize("mask", MASKS)
def test_attention_with_a_causal_bias_is_that_with_its_values(mask: CausalBias, casts: FunctionCasts) -> None:
    tensors = arguments(mask)
    expected = F.scaled_dot_product_attention(**tensors, attn_mask=mask._materialize())
    for actual in (
        F.scaled_dot_product_attention(**tensors, attn_mask=mask),
        F.scaled_dot_product_attention(*tensors.values(), mask),
    ):
        assert actual.dtype is casts.dtype
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("mask", MASKS)
def test_so_it_is_while_casts_are_off_and_afterwards(mask: CausalBias) -> None:
    tensors = arguments(mask)
    expected = F.scaled_dot_product_attention(**tensors, attn_mask=mask)
    before = vars(CausalBias)["__torch_function__"]
    casts = FunctionCasts(torch.bfloat16)
    casts.install()
    with casts.disabled():
        off = F.scaled_dot_product_attention(**tensors, attn_mask=mask)
    casts.remove()
    assert vars(CausalBias)["__torch_function__"] is before
    assert torch.equal(off, expected)
    assert torch.equal(F.scaled_dot_product_attention(**tensors, attn_mask=mask), expected)
