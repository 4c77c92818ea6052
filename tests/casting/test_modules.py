"""Modules whose work is done inside C++ or past `torch.nn.functional`: attention, transformers, adaptive softmax."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from amp_engine.casting import FunctionCasts
from tests.casting.cuda_autocast import tensors_in

f32 = torch.float32
WIDTH = 8
X = torch.linspace(-1, 1, 2 * 3 * WIDTH).reshape(2, 3, WIDTH)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def encoder(layers: int, **options: Any) -> nn.Module:
    """A transformer encoder, or one layer of it for 0."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, activation="gelu", batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False) if layers else layer


def check(module: nn.Module, args: tuple[Any, ...], expected: torch.dtype, casts: FunctionCasts, **kwargs: Any) -> None:
    """The results' type, and numbers and gradients near those in FP32, whatever type comes in."""
    twin = copy.deepcopy(module)
    with casts.disabled():
        wanted = [t for t in tensors_in(twin(*args, **kwargs)) if t.is_floating_point()]
        if module.training:
            sum(t.square().mean() for t in wanted).backward()
    for dtype in (f32, casts.dtype):
        module.zero_grad()
        results = [t for t in tensors_in(module(*(a.to(dtype) for a in args), **kwargs)) if t.is_floating_point()]
        assert len(results) == len(wanted)
        for result, target in zip(results, wanted, strict=True):
            assert result.dtype is expected
            torch.testing.assert_close(result.float(), target, atol=0.05, rtol=0.05)
        if not module.training:
            continue
        sum(t.float().square().mean() for t in results).backward()
        for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
            assert p.grad is not None, name
            assert p.grad.dtype is f32
            torch.testing.assert_close(p.grad, q.grad, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("layers", [0, 2], ids=["layer", "encoder"])
def test_a_transformer_encoder_ends_in_its_norm_in_fp32(mode: str, layers: int, casts: FunctionCasts) -> None:
    with torch.set_grad_enabled(mode != "no_grad"):
        check(built(lambda: encoder(layers)).train(mode == "train"), (X,), f32, casts)


@pytest.mark.parametrize("layers", [0, 2], ids=["layer", "encoder"])
def test_a_transformer_encoder_with_its_norms_first_keeps_the_type_that_comes_in(
    layers: int, casts: FunctionCasts
) -> None:
    module = built(lambda: encoder(layers, norm_first=True)).eval()
    with torch.no_grad():
        for dtype in (f32, casts.dtype):
            assert module(X.to(dtype)).dtype is dtype  # of the sum with what every layer adds


def test_a_padded_encoder_with_nested_tensors_runs_in_eval(casts: FunctionCasts) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2).eval()
    with torch.no_grad():
        with casts.disabled():
            wanted = stack(X, src_key_padding_mask=PADDING)
        for dtype in (f32, casts.dtype):
            result = stack(X.to(dtype), src_key_padding_mask=PADDING)
            assert result.dtype is f32
            kept = ~PADDING
            torch.testing.assert_close(result[kept], wanted[kept], atol=0.05, rtol=0.05)


def test_the_fused_transformer_is_off_while_casts_are_installed(low: torch.dtype) -> None:
    for before in (True, False):
        torch.backends.mha.set_fastpath_enabled(before)
        try:
            casts = FunctionCasts(low)
            casts.install()
            assert not torch.backends.mha.get_fastpath_enabled()
            casts.remove()
            assert torch.backends.mha.get_fastpath_enabled() is before
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


FUTURE = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])
PADDING = torch.tensor([[False, False, True], [False, False, False]])
MASKS = {
    "none": {},
    "bool": {"attn_mask": FUTURE, "key_padding_mask": PADDING},
    "float": {
        "attn_mask": torch.zeros(3, 3).masked_fill(FUTURE, float("-inf")),
        "key_padding_mask": torch.zeros(2, 3).masked_fill(PADDING, float("-inf")),
    },
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", [{}, {"kdim": WIDTH, "vdim": WIDTH}, {"add_bias_kv": True}], ids=str)
def test_attention_is_in_low_precision_and_its_weights_in_the_type_of_their_mean(
    training: bool, need_weights: bool, masks: str, options: dict[str, Any], casts: FunctionCasts
) -> None:
    module = built(lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)).train(training)
    keywords = {"need_weights": need_weights, **MASKS[masks]}
    with casts.disabled():
        wanted, wanted_weights = module(X, X, X, **keywords)
    for dtype in (f32, casts.dtype):
        x = X.to(dtype)
        result, weights = module(x, x, x, **keywords)
        assert result.dtype is casts.dtype
        torch.testing.assert_close(result.float(), wanted, atol=0.05, rtol=0.05)
        assert (weights is None) is not need_weights
        if weights is not None:
            assert weights.dtype is f32  # what the softmax gave
            torch.testing.assert_close(weights, wanted_weights, atol=0.05, rtol=0.05)


def test_adaptive_softmax_takes_low_precision_and_gives_its_numbers(casts: FunctionCasts) -> None:
    module = built(lambda: nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 12, [3, 6], div_value=2.0))
    target = torch.arange(6) * 2
    losses, gradients = [], []
    for is_cast in (False, True):
        for dtype in (f32, casts.dtype) if is_cast else (f32,):
            module.zero_grad()
            inputs = X.reshape(6, WIDTH).to(dtype).requires_grad_()
            with nullcontext() if is_cast else casts.disabled():
                output, loss = module(inputs, target)
            assert output.dtype == f32
            loss.float().backward()
            losses.append(loss.float())
            gradients.append(module.head.weight.grad.clone())
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=2e-2, atol=0)
        torch.testing.assert_close(gradient, gradients[0], rtol=5e-2, atol=5e-3)
