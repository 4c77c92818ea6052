"""nn.RNN, nn.LSTM, nn.GRU and their cells in low precision; and their weights cast as one chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import rnn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from amp_engine.casting import FunctionCasts
from amp_engine.casting.recurrent import cast_chunk

NETWORKS = {
    "RNN-tanh": lambda **k: nn.RNN(3, 4, **k),
    "RNN-relu": lambda **k: nn.RNN(3, 4, nonlinearity="relu", **k),
    "LSTM": lambda **k: nn.LSTM(3, 4, **k),
    "GRU": lambda **k: nn.GRU(3, 4, **k),
}
CELLS = {
    "RNN-tanh": lambda: nn.RNNCell(3, 4),
    "RNN-relu": lambda: nn.RNNCell(3, 4, nonlinearity="relu"),
    "LSTM": lambda: nn.LSTMCell(3, 4),
    "GRU": lambda: nn.GRUCell(3, 4),
}


STATES = [("float", None), ("low", "float"), ("float", "low")]  # input, hidden


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, PackedSequence):
        return [value.data]
    return [value] if isinstance(value, Tensor) else [t for item in value for t in flat(item)]


def state(kind: str, *shape: int, dtype: torch.dtype) -> Any:
    h = torch.full(shape, 0.5, dtype=dtype)
    return (h, h.clone()) if kind == "LSTM" else h


def positive(module: nn.Module) -> nn.Module:
    """Keep all pre-activations on one side of relu's kink, where rounding changes no gradient."""
    for p in module.parameters():
        p.data.abs_()
    return module


def assert_runs_low(casts: FunctionCasts, module: nn.Module, *args: Any) -> None:
    """Outputs and hidden states low and right, gradients of weights FP32 and right."""
    results = flat(module(*args))
    assert {t.dtype for t in results} == {casts.dtype}
    grads = torch.autograd.grad(sum(t.float().sum() for t in results), list(module.parameters()))
    assert {grad.dtype for grad in grads} == {torch.float32}
    with casts.disabled():
        args = tuple(
            PackedSequence(a.data.float(), *a[1:])
            if isinstance(a, PackedSequence)
            else tuple(t.float() for t in a)
            if isinstance(a, tuple)
            else None
            if a is None
            else a.float()
            for a in args
        )
        expected = flat(module(*args))
        expected_grads = torch.autograd.grad(sum(t.sum() for t in expected), list(module.parameters()))
    for ours, plain in (*zip(results, expected, strict=True), *zip(grads, expected_grads, strict=True)):
        torch.testing.assert_close(ours.float(), plain, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}], ids=str
)
@pytest.mark.parametrize(("input", "hidden"), STATES)
def test_networks_run_in_low_precision(
    kind: str, options: dict[str, Any], input: str, hidden: str | None, casts: FunctionCasts
) -> None:
    types = {"float": torch.float32, "low": casts.dtype}
    network = positive(NETWORKS[kind](**options))
    x = torch.rand(5, 5, 3).to(types[input])
    layers = 4 if "num_layers" in options else 1
    hx = None if hidden is None else state(kind, layers, 5, 4, dtype=types[hidden])
    assert_runs_low(casts, network, x, hx)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("input", ["float", "low"])
def test_networks_take_packed_sequences(kind: str, input: str, casts: FunctionCasts) -> None:
    x = torch.randn(4, 2, 3).to(casts.dtype if input == "low" else torch.float32)
    network, packed = NETWORKS[kind](), pack_padded_sequence(x, torch.tensor([4, 2]))
    assert_runs_low(casts, network, packed)
    assert pad_packed_sequence(network(packed)[0])[0].dtype == casts.dtype


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(("input", "hidden"), STATES)
def test_cells_run_in_low_precision(kind: str, input: str, hidden: str | None, casts: FunctionCasts) -> None:
    types = {"float": torch.float32, "low": casts.dtype}
    hx = None if hidden is None else state(kind, 2, 4, dtype=types[hidden])
    assert_runs_low(casts, CELLS[kind](), torch.randn(2, 3).to(types[input]), hx)


def test_weights_of_a_cell_that_is_unrolled_are_cast_once(casts: FunctionCasts) -> None:
    cell, h = nn.GRUCell(3, 4), None
    for _ in range(5):
        h = cell(torch.randn(2, 3), h)
    assert len(casts.cache.kept()) == 4


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_an_lstm_under_the_old_weight_norm_trains(casts: FunctionCasts) -> None:
    lstm = nn.utils.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    assert_runs_low(casts, lstm, torch.randn(5, 2, 3))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_an_lstm_with_projections_runs(casts: FunctionCasts) -> None:
    assert_runs_low(casts, nn.LSTM(3, 4, proj_size=2), torch.randn(5, 2, 3))


def test_a_double_network_is_not_touched(casts: FunctionCasts) -> None:
    y, _ = nn.LSTM(3, 4).double()(torch.randn(5, 2, 3).double())
    assert y.dtype == torch.float64


@pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 4), lambda: nn.RNN(3, 4)], ids=["LSTM", "RNN"])
def test_shapes_are_still_checked(make: Any, casts: FunctionCasts) -> None:
    network = make()
    with pytest.raises(RuntimeError, match="input.size\\(-1\\) must be equal to input_size"):
        network(torch.randn(5, 2, 7).to(casts.dtype))
    with pytest.raises(RuntimeError, match="Expected hidden|hidden\\[0\\]"):
        network(torch.randn(5, 2, 3), state(type(network).__name__, 9, 2, 4, dtype=torch.float32))


def test_what_is_not_recurrent_is_passed_on(casts: FunctionCasts) -> None:
    assert rnn._VF.dropout is torch._VF.dropout


# --- cast_chunk -----------------------------------------------------------------------------------


def views(*shapes: tuple[int, ...], order: list[int] | None = None, gap: int = 0) -> list[Tensor]:
    """Parameters that are views of one buffer, in the order of `shapes` or as `order` says."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    buffer = torch.arange(float(sum(sizes) + gap * len(sizes)))
    weights: list[Any] = [None] * len(shapes)
    offset = 0
    for i in order or range(len(shapes)):
        weights[i] = nn.Parameter(buffer[offset : offset + sizes[i]].view(shapes[i]))
        offset += sizes[i] + gap
    return weights


SHAPES = [(4, 3), (4, 2), (4,), (4,)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]], ids=str)
def test_weights_in_one_chunk_become_casts_in_one_chunk(order: list[int], low: torch.dtype) -> None:
    weights = views(*SHAPES, order=order)
    casts = cast_chunk(weights, low)
    assert casts is not None
    assert len({c.untyped_storage().data_ptr() for c in casts}) == 1
    for weight, cast in zip(weights, casts, strict=True):
        assert cast.storage_offset() == weight.storage_offset()
        assert cast.is_contiguous()
        assert torch.equal(cast, weight.to(low))


def test_gradients_of_a_chunk_reach_each_weight(low: torch.dtype) -> None:
    weights = views(*SHAPES, order=[2, 0, 3, 1])
    weights[1].requires_grad_(False)
    casts = cast_chunk(weights, low)
    assert casts is not None
    sum((i + 1) * cast.sum() for i, cast in enumerate(casts)).backward()
    assert weights[1].grad is None
    for i in (0, 2, 3):
        assert weights[i].grad.dtype == torch.float32
        assert torch.equal(weights[i].grad, torch.full_like(weights[i], i + 1))


OTHER_LAYOUTS = {
    "own storages": lambda: [nn.Parameter(torch.ones(s)) for s in SHAPES],
    "a gap": lambda: views(*SHAPES, gap=1),
    "not from the start": lambda: views((2,), *SHAPES)[1:],
    "a weight twice": lambda: [views(*SHAPES)[0]] * 2,
    "transposed": lambda: [nn.Parameter(views((3, 4))[0].detach().t())],
    "one elsewhere": lambda: [*views(*SHAPES), nn.Parameter(torch.ones(4))],
}


@pytest.mark.parametrize("make", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_weights_in_any_other_layout_are_not_a_chunk(make: Any, low: torch.dtype) -> None:
    assert cast_chunk(make(), low) is None


def test_a_chunk_runs_an_lstm_as_its_weights_do(low: torch.dtype) -> None:
    lstm = nn.LSTM(3, 4)
    weights = [getattr(lstm, name) for name in lstm._flat_weights_names]
    flat_weights = views(*[tuple(w.shape) for w in weights])
    for mine, theirs in zip(flat_weights, weights, strict=True):
        mine.data.copy_(theirs.data)
    chunk = cast_chunk(flat_weights, low)
    assert chunk is not None
    x, h = torch.randn(5, 2, 3).to(low), torch.zeros(1, 2, 4, dtype=low)
    args = (x, (h, h))
    options = (True, 1, 0.0, False, False, False)
    ours = torch._VF.lstm(*args, chunk, *options)
    theirs = torch._VF.lstm(*args, [w.to(low) for w in weights], *options)
    assert torch.equal(ours[0], theirs[0])


def test_an_input_that_is_not_cast_is_refused_by_torch_as_ever() -> None:
    lstm = nn.LSTM(3, 4)
    casts = FunctionCasts(torch.float16)
    casts.install()
    try:
        with pytest.raises(ValueError, match="does not match weight dtype"):
            lstm(torch.ones(2, 1, 3, dtype=torch.float64))
        with casts.disabled(), pytest.raises(ValueError, match="does not match weight dtype"):
            lstm(torch.ones(2, 1, 3, dtype=torch.float16))
    finally:
        casts.remove()
