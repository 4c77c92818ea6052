"""Layers of torch in a cast model take inputs in the type of their weights; other mixes of types are explained."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from amp_engine import AmpStateError, amp
from tests.support import HALF, assert_bitwise, backward

HALF_LEVELS = ("O2", "O3", "O5")
X = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(16).reshape(2, 8) % 8
LAYERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "Linear": (lambda: nn.Linear(8, 4), (X,)),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 4), (X, X)),
    "Conv1d": (lambda: nn.Conv1d(8, 4, 3), (X,)),
    "Conv2d": (lambda: nn.Conv2d(2, 4, 3), (X,)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(8, 4, 3), (X,)),
    "LayerNorm": (lambda: nn.LayerNorm(8), (X,)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), (X,)),
    "PReLU": (lambda: nn.PReLU(8), (X,)),
    "LSTM": (lambda: nn.LSTM(8, 4), (X,)),
    "GRU with a state": (lambda: nn.GRU(8, 4), (X, torch.zeros(1, 8, 4))),
    "LSTM with states": (lambda: nn.LSTM(8, 4), (X, (torch.zeros(1, 8, 4), torch.zeros(1, 8, 4)))),
    "LSTM, packed": (lambda: nn.LSTM(8, 4), (pack_padded_sequence(X, torch.tensor([2, 1] * 4), enforce_sorted=False),)),
    "GRUCell": (lambda: nn.GRUCell(8, 4), (X[0],)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(8, 4, mode="sum"), (IDS, None, X[0, :2])),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2), (X, X, X)),
    "Linear, parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), (X,)),
}


class Around(nn.Module):
    """Gives a layer what it was given, after `change`."""

    def __init__(self, layer: nn.Module, change: Any) -> None:
        super().__init__()
        self.first, self.layer, self.change = nn.Linear(1, 1), layer, change

    def forward(self, *args: Any) -> Any:
        return self.layer(*(self.change(arg) for arg in args))


def first_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else first_tensor(value[0])


def to(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_floating_point():
        return value
    if isinstance(value, Tensor) or hasattr(value, "batch_sizes"):
        return value.to(dtype)
    return value if value is None else tuple(item.to(dtype) for item in value)


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_half_layer_takes_fp32_that_a_forward_made(level: str, name: str) -> None:
    make, given = LAYERS[name]
    torch.manual_seed(0)
    model = Around(make().eval(), lambda arg: to(torch.float32, arg)).eval()
    amp.initialize(model, opt_level=level, verbosity=0)
    ours = first_tensor(model(*given))
    half = HALF[level]
    assert_bitwise(ours, first_tensor(model.layer(*(to(half, arg) for arg in given))))


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("name", LAYERS)
def test_an_fp32_layer_of_a_half_model_takes_half_and_gives_half(level: str, name: str) -> None:
    make, given = LAYERS[name]
    half = HALF[level]
    torch.manual_seed(0)
    layer = make().eval()
    expected = first_tensor(layer(*(to(torch.float32, to(half, arg)) for arg in given)))
    model = Around(layer, lambda arg: to(half, arg)).eval()
    model.first.to(half)
    amp.initialize(model, opt_level=level, verbosity=0)
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(first_tensor(output).dtype))
    ours = first_tensor(model(*given))
    assert seen == [half]
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def test_gradients_flow_through_the_casts_of_a_layer() -> None:
    model = Around(nn.Linear(8, 4), lambda arg: arg.float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    x = X.clone().requires_grad_()
    backward(model(x).square().mean(), optimizer)
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    assert x.grad.any()


def test_a_layer_of_ones_own_may_mix_types() -> None:
    class Widening(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.given = Widening(8), []

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.norm(x))
            self.given.append(x.dtype)
            return x

    model = amp.initialize(Model(), opt_level="O5", verbosity=0)
    model(X)
    assert model.given == [torch.float32]


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_levels_that_cast_functions_leave_layers_alone(level: str) -> None:
    model = Around(nn.Linear(8, 4), lambda arg: arg.half())
    amp.initialize(model, opt_level=level, verbosity=0, casts="model")
    assert model(X).dtype is torch.float32


@pytest.mark.parametrize("name", ["Linear", "Conv1d", "LayerNorm"])
def test_a_compiled_model_has_the_casts_of_its_layers(name: str, dynamo: None) -> None:
    make, given = LAYERS[name]
    model = Around(make(), lambda arg: arg.float())
    amp.initialize(model, opt_level="O5", verbosity=0)
    expected = model(*given)
    assert_bitwise(torch.compile(model, backend="eager", fullgraph=True)(*given), expected)


# --- modules with buffers and no parameters, in a model that came in FP32 ----------------------------


class Table(nn.Module):
    """Has a table, and parameters only if asked."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(8, 8))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.layers(x))

    def compute(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[-2]]


class Product(Table):
    def compute(self, x: Tensor) -> Tensor:
        return x @ self.table


class Average(Table):
    def compute(self, x: Tensor) -> Tensor:
        self.table.lerp_(x.detach().mean(0), 2.0**-10)
        return self.table.lerp(x, 0.5)


class Rotation(Table):
    """Computes angles beyond 256 from whole numbers, as rotary embeddings do."""

    def compute(self, x: Tensor) -> Tensor:
        return x * torch.cos(1000.0 * self.table[: x.shape[-2]])


class Own(nn.Module):
    """Computes with its half weights by a function, which takes no FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


TABLES = [Table, Product, Average, Rotation]


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_module_of_buffers_alone_computes_in_fp32(level: str, kind: Any, is_compiled: bool, dynamo: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(kind(), nn.Dropout(0.0)), Own())
    before = model[1][0].table.clone()
    expected, written = model(X), model[1][0].table.clone()
    model[1][0].table.copy_(before)
    amp.initialize(model, opt_level=level, verbosity=0)
    assert model[1][0].table.dtype is torch.float32
    ours = (torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model)(X)
    eps = torch.finfo(HALF[level]).eps
    assert (ours - expected).norm() / expected.norm() < 4 * eps
    if kind is Average:
        assert not torch.equal(written, before)
        assert (model[1][0].table - written).abs().max() < eps * (written - before).abs().max()


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("kind", TABLES)
def test_a_module_of_buffers_and_parameters_is_cast(level: str, kind: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), kind(nn.Linear(8, 8)), Own())
    amp.initialize(model, opt_level=level, verbosity=0)
    assert model[1].table.dtype is HALF[level]
    model(X)
    amp.close()
    assert model[1].table.dtype is torch.float32


def test_a_module_of_buffers_inside_of_another_or_of_a_kept_one_gives_fp32_to_it() -> None:
    class Outer(Table):
        def compute(self, x: Tensor) -> Tensor:
            self.given = x.dtype
            return super().compute(x)

    nested = Outer(Product())
    kept = amp.keep_float(nn.Sequential(nn.Linear(8, 8), Product(), nn.Linear(8, 8)))
    seen = []
    kept[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = amp.initialize(nn.Sequential(nn.Linear(8, 8), nested, kept, Own()), opt_level="O5", verbosity=0)
    model(X)
    assert seen == [torch.float32]
    assert nested.given is torch.float32


def test_a_module_of_buffers_that_a_script_calls_gives_fp32() -> None:
    model = amp.initialize(nn.Sequential(nn.Linear(8, 8), Rotation()), opt_level="O5", verbosity=0)
    expected = X * torch.cos(1000.0 * model[1].table)
    assert_bitwise(model[1](X), expected)
    assert_bitwise(model[1](X.bfloat16()), X.bfloat16().float() * torch.cos(1000.0 * model[1].table))


def test_what_a_module_of_buffers_puts_into_a_dictionary_is_there() -> None:
    class Normalize(Table):
        def forward(self, batch: dict[str, Tensor]) -> None:  # type: ignore[override]
            batch["x"] = batch["x"] - self.table

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.normalize, self.last = nn.Linear(8, 8), Normalize(), Own()

        def forward(self, x: Tensor) -> Tensor:
            batch = {"x": self.first(x)}
            self.normalize(batch)
            return self.last(batch["x"])

    model = Model()
    expected = model(X)
    amp.initialize(model, opt_level="O5", verbosity=0)
    assert (model(X) - expected).norm() / expected.norm() < 0.02


def test_float64_goes_into_a_module_of_buffers_as_it_is() -> None:
    class Wide(Table):
        def compute(self, x: Tensor) -> Tensor:
            self.given = x.dtype
            return x.to(self.table.dtype)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.wide = nn.Linear(8, 8), Wide()

        def forward(self, x: Tensor) -> Tensor:
            return self.first(self.wide(x.double()))

    for level in ("O0", "O5"):
        model = amp.initialize(Model(), opt_level=level, verbosity=0)
        model(X)
        assert model.wide.given is torch.float64
        amp.close()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", ["kept", "table", "table alone"])
def test_a_recomputed_part_casts_as_it_did(level: str, kind: str, reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.inner = amp.keep_float(nn.Linear(8, 8)) if kind == "kept" else Table()
            self.weight = nn.Parameter(torch.rand(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            inner = self.inner
            x = self.first(x)
            if kind == "table alone":
                return checkpoint(lambda x: inner(x) @ self.weight, x, use_reentrant=reentrant)
            return inner(x) @ self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(8, 8), Block()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.block(x) if kind == "table alone" else checkpoint(self.block, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    backward(model(X).square().mean(), optimizer)
    assert all(param.grad is not None for param in amp.master_params(optimizer))


def test_the_banner_names_buffers_that_stay_and_those_that_might_have_to(capsys: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Table(), Table(nn.Linear(8, 8)))
    model.register_buffer("mask", torch.eye(8))
    model.register_buffer("count", torch.ones(8))
    amp.initialize(model, opt_level="O5")
    said = " ".join(capsys.readouterr().out.split())
    assert "modules with buffers and no parameters compute in FP32: 1.table." in said
    assert "buffers beside parameters are cast with them: count, 2.table. For one that counts" in said


# --- the message ---------------------------------------------------------------------------------------


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.query(x) @ x.mT).float()
        return scores.softmax(-1) @ x


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_a_mix_of_types_names_the_module_the_line_and_what_to_type(level: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Mixing())
    amp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises(AmpStateError) as caught:
        model(X)
    text, half = str(caught.value), str(HALF[level])[len("torch.") :]
    assert text.startswith(f"Mixing '1' gave an operation both float32 and {half}, at {__file__}:")
    assert f"Write .to(torch.{half}) there, or call amp.keep_float(model.1) before amp.initialize" in text
    other = {"float16": "O1", "bfloat16": "O4"}[half]
    assert f"or choose opt_level='{other}'" in text
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_errors_of_a_forward_stay_as_they_are() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if x.dim() == 2:
                raise RuntimeError("The numbers of heads must be the same")
            return self.layer(x[..., :3])

    model = amp.initialize(Wrong(), opt_level="O5", verbosity=0)
    for given, said in ((X, "shapes cannot be multiplied"), (X[0], "The numbers of heads")):
        with pytest.raises(RuntimeError, match=re.escape(said)) as caught:
            model(given)
        assert type(caught.value) is RuntimeError
