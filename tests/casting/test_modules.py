"""Modules whose work is done inside C++ or past `torch.nn.functional`: attention, transformers, recurrent networks."""

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
STATE = X[:, 0]


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
    padding = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        with casts.disabled():
            wanted = stack(X, src_key_padding_mask=padding)
        for dtype in (f32, casts.dtype):
            result = stack(X.to(dtype), src_key_padding_mask=padding)
            assert result.dtype is f32
            kept = ~padding
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


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": WIDTH, "vdim": WIDTH}, {"add_bias_kv": True}], ids=str
)
def test_attention_is_in_low_precision_and_its_weights_in_the_type_of_their_mean(
    training: bool, need_weights: bool, options: dict[str, Any], casts: FunctionCasts
) -> None:
    module = built(lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)).train(training)
    with casts.disabled():
        wanted, wanted_weights = module(X, X, X, need_weights=need_weights)
    for dtype in (f32, casts.dtype):
        x = X.to(dtype)
        result, weights = module(x, x, x, need_weights=need_weights)
        assert result.dtype is casts.dtype
        torch.testing.assert_close(result.float(), wanted, atol=0.05, rtol=0.05)
        assert (weights is None) is not need_weights
        if weights is not None:
            assert weights.dtype is f32  # what the softmax gave
            torch.testing.assert_close(weights, wanted_weights, atol=0.05, rtol=0.05)


RECURRENT = {
    "RNN": lambda: nn.RNN(WIDTH, 4, 2, batch_first=True),
    "RNN, relu": lambda: nn.RNN(WIDTH, 4, nonlinearity="relu", batch_first=True),
    "LSTM": lambda: nn.LSTM(WIDTH, 4, 2, bidirectional=True, batch_first=True),
    "LSTM, projected": lambda: nn.LSTM(WIDTH, 4, proj_size=2, batch_first=True),
    "GRU": lambda: nn.GRU(WIDTH, 4, bias=False, batch_first=True),
}
CELLS = {
    "RNNCell": lambda: nn.RNNCell(WIDTH, 4),
    "RNNCell, relu": lambda: nn.RNNCell(WIDTH, 4, nonlinearity="relu"),
    "LSTMCell": lambda: nn.LSTMCell(WIDTH, 4),
    "GRUCell": lambda: nn.GRUCell(WIDTH, 4, bias=False),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # which path it takes
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_networks_are_in_low_precision(name: str, training: bool, casts: FunctionCasts) -> None:
    check(built(RECURRENT[name]).train(training), (X,), casts.dtype, casts)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CELLS)
def test_recurrent_cells_are_in_low_precision(name: str, training: bool, casts: FunctionCasts) -> None:
    check(built(CELLS[name]).train(training), (STATE,), casts.dtype, casts)


@pytest.mark.parametrize("given", [f32, None], ids=["FP32", "low"])
def test_a_given_state_may_have_either_type(given: torch.dtype | None, casts: FunctionCasts) -> None:
    lstm, cell = built(RECURRENT["LSTM"]), built(CELLS["LSTMCell"])
    state = torch.zeros(4, 2, 4, dtype=given or casts.dtype)
    output, (hidden, memory) = lstm(X, (state, state))
    assert {t.dtype for t in (output, hidden, memory)} == {casts.dtype}
    assert {t.dtype for t in cell(STATE, (state[0], state[0]))} == {casts.dtype}


def test_weight_norm_takes_its_norm_in_fp32(casts: FunctionCasts) -> None:
    with pytest.warns(FutureWarning):
        linear = nn.utils.weight_norm(nn.Linear(WIDTH, 4))
    assert linear(X).dtype is casts.dtype


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
