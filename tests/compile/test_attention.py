"""Attention of torch.nn.attention, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention

from amp_engine import amp
from tests.support import FUNCTION_LEVELS, HALF, assert_bitwise

MASK = causal_lower_right(3, 5)


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_attention_with_a_causal_bias_is_compiled_in_low(level: str) -> None:
    def attention(query: Tensor, key: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key, attn_mask=MASK)

    query, key = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    plain = attention(query, key)
    for table in (torch._dynamo.variables.torch.get_overridable_functions, torch.overrides._get_overridable_functions):
        table.cache_clear()
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    run = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert run(query, key).dtype is attention(query, key).dtype is HALF[level]
    tolerance = 4 * torch.finfo(HALF[level]).eps
    torch.testing.assert_close(run(query, key).float(), plain, rtol=tolerance, atol=tolerance)
    with amp.disable_casts():
        torch.testing.assert_close(run(query, key), plain)


def products(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.exp(score * 0.1) + query - key


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("level", FUNCTION_LEVELS)
@pytest.mark.parametrize("types", [("float32",) * 3, ("float32", "float32", "low"), ("low",) * 3])
def test_flex_attention_is_cast_as_under_autocast(level: str, types: tuple[str, ...]) -> None:
    dtypes = [HALF[level] if name == "low" else torch.float32 for name in types]
    tensors = [torch.randn(1, 2, 16, 16, dtype=dtype) for dtype in dtypes]
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        nodes = [node for node in graph.graph.nodes if node.target is torch.ops.higher_order.flex_attention]
        seen.extend(arg.meta["example_value"].dtype for node in nodes for arg in node.args[:3])
        return graph.forward

    with torch.autocast("cpu", dtype=HALF[level]):
        expected = flex_attention(*tensors, score_mod=products)
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    assert_bitwise(flex_attention(*tensors, score_mod=products), expected)
    assert_bitwise(torch.compile(flex_attention, fullgraph=True, backend=backend)(*tensors, products), expected)
    assert seen == [HALF[level]] * 3
    with amp.disable_casts():
        assert flex_attention(*(tensor.float() for tensor in tensors), score_mod=products).dtype is torch.float32
