"""Parts of a model that a script calls by themselves, at any depth: they are cast as the model is."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from amp_engine import amp
from amp_engine.initialization.cast_model import without_casts
from tests.support import assert_bitwise

CAST_LEVELS = ("O0", "O2")  # that cast to FP32, and to half

HALF_LEVELS = ("O2", "O3")


class Pair(NamedTuple):
    y: Tensor
    n: int


@dataclass
class Record:
    y: Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Any, *, scale: float = 1.0) -> dict[str, Any]:
        y = self.norm(self.linear(x["x"] if isinstance(x, dict) else x)) * scale
        return {"y": y, "pair": Pair(y, 1), "record": Record(y), "list": [y]}


class Nested(nn.Module):
    """Notes the types that its parts give within its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.recurrent = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 4)
        self.given: list[torch.dtype] = []

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self._seen(layer(x)["y"])
        for part in (self.body, self.named["a"], self.normed, self.attention, self.head):
            x = self._seen(part(x))
        return self._seen(self.recurrent(x)[0])

    def forward(self, ids: Tensor) -> Tensor:
        return self.through(self._seen(self.embedding(ids))) @ self.head.weight

    def _seen(self, x: Tensor) -> Tensor:
        self.given.append(x.dtype)
        return x


IDS = torch.tensor([1, 2, 3, 1, 5, 7, 9, 0])


def initialized(level: str, model: nn.Module | None = None) -> tuple[Any, Tensor, torch.dtype]:
    torch.manual_seed(0)
    model = model or Nested().eval()
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, verbosity=0)
    half = next(p.dtype for p in model.parameters())
    return model, torch.randn(8, 4), half


PARTS: dict[str, Any] = {
    "item of a list": lambda model: model.layers[3],
    "item of a dict": lambda model: model.named["a"],
    "item of a sequential": lambda model: model.body[0],
    "within two": lambda model: model.body[1][1],
    "linear of a block": lambda model: model.layers[1].linear,
    "norm of a block": lambda model: model.layers[1].norm,
    "parametrized": lambda model: model.normed,
    "transformer layer": lambda model: model.attention,
    "layer's linear": lambda model: model.attention.linear1,
    "recurrent": lambda model: model.recurrent,
}
CALLS: dict[str, Any] = {
    "call": lambda part, x: part(x),
    "forward": lambda part, x: part.forward(x),
    "class's forward": lambda part, x: type(part).forward(part, x),
    "no gradients": lambda part, x: torch.no_grad()(lambda: part(x))(),
}


def by_hand(part: nn.Module, x: Tensor, half: torch.dtype) -> Any:
    twin = copy.deepcopy(part)
    without_casts(twin)
    return twin(x.to(half) if any(param.dtype is half for param in part.parameters()) else x)


def tensors(output: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]


@pytest.mark.parametrize("level", CAST_LEVELS)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("how", CALLS)
def test_a_part_at_any_depth_is_cast_as_the_model_is(level: str, name: str, how: str) -> None:
    model, x, half = initialized(level)
    part = PARTS[name](model)
    given = tensors(CALLS[how](part, x))
    assert {t.dtype for t in given} == {torch.float32}
    with torch.set_grad_enabled(how != "no gradients"):  # of which kernels depend
        assert_bitwise(given, [t.float() for t in tensors(by_hand(part, x, half))])


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_parts_within_a_forward_are_left_as_the_model_has_them(level: str) -> None:
    model, _, half = initialized(level)
    assert model(IDS).dtype is torch.float32
    assert set(model.given) == {half}
    model.given.clear()
    model.through(model.embedding(IDS))  # a method of the user's, outside of it
    assert set(model.given) == {torch.float32}


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_close_gives_all_parts_their_classes_back(level: str) -> None:
    plain = Nested()
    before = [(type(module).__mro__, {*vars(module)}) for module in plain.modules()]
    model, _, _ = initialized(level, plain)
    parametrizations.spectral_norm(model.head)
    parametrize.remove_parametrizations(model.head, "weight")
    amp.close()
    for (kinds, names), module in zip(before, model.modules(), strict=True):
        assert vars(module).keys() == names
        # A parametrized module's own class is made for it.
        assert type(module).__mro__[1:] == kinds[1:] if parametrize.is_parametrized(module) else kinds
    assert not any("amp_engine" in kind.__module__ for m in model.modules() for kind in type(m).__mro__)


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_parametrizations_come_and_go_and_their_weights_keep_their_type(level: str) -> None:
    model, x, half = initialized(level)
    expected = model.normed(x)
    assert model.normed.weight.dtype is half
    parametrize.remove_parametrizations(model.normed, "weight")
    assert_bitwise(model.normed(x), expected)
    parametrizations.weight_norm(model.head)
    assert model.head.weight.dtype is half
    assert model.head(x).dtype is torch.float32
    amp.close()
    assert type(model.head).__bases__ == (nn.Linear,)
    assert not hasattr(model.head, "_amp_engine_casts")


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("joins", ["attribute", "list", "deep"])
def test_what_joins_a_model_is_cast_too(level: str, joins: str) -> None:
    model, x, half = initialized(level)
    part = nn.Sequential(nn.Linear(4, 4)).to(half)
    if joins == "attribute":
        model.late = part
    elif joins == "list":
        model.layers.append(part)
    else:
        model.body[1].add_module("late", nn.ModuleDict({"a": part}))
    assert part(x).dtype is torch.float32
    assert part[0](x).dtype is torch.float32
    in_float = nn.Linear(4, 4)
    expected = in_float(x)
    model.later = in_float
    assert_bitwise(model.later(x), expected)
    amp.close()
    assert type(part[0]) is nn.Linear


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_a_kept_module_gives_float32_outside_and_the_models_type_within(level: str) -> None:
    model = Nested().eval()
    amp.keep_float(model.body)
    model, x, half = initialized(level, model)
    plain = copy.deepcopy(model.body)
    without_casts(plain)
    assert_bitwise(model.body(x), plain(x))
    assert_bitwise(model.body[1](x), plain[1](x))
    model(IDS)
    assert set(model.given) == {half}


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("step", [1, -1])
def test_a_model_within_a_model_is_a_part_of_it(level: str, at_once: bool, step: int) -> None:
    model = Nested().eval()
    x = torch.randn(2, 4)
    models: list[nn.Module] = [model.body, model][::step]
    for some in [models] if at_once else [[model] for model in models]:
        amp.initialize(some, opt_level=level, verbosity=0)
    assert {model.body(x).dtype, model.body[1](x).dtype, model(IDS).dtype} == {torch.float32}
    assert set(model.given) == {model.head.weight.dtype}
    amp.close()
    assert type(model.body[0]) is nn.Linear
    assert model.body(x).dtype is torch.float32


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_the_casts_of_parts(error: type[BaseException]) -> None:
    class Raises(Nested):
        def forward(self, ids: Tensor) -> Tensor:
            raise error

    model, x, _ = initialized("O2", Raises())
    with pytest.raises(error):
        model(IDS)
    assert model.head(x).dtype is torch.float32


def test_a_part_called_while_another_thread_runs_the_model_is_cast() -> None:
    dtypes = []

    class Waits(Nested):
        def forward(self, ids: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: dtypes.append(self.head(torch.randn(2, 4)).dtype))
            thread.start()
            thread.join()
            return super().forward(ids)

    model, _, half = initialized("O2", Waits().eval())
    model(IDS)
    assert dtypes == [torch.float32]
    assert set(model.given) == {half}


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # in torch 2.11
def test_the_fused_path_of_a_transformer_layer_is_taken() -> None:
    model, x, _ = initialized("O5")
    with torch.no_grad(), torch.profiler.profile() as profile:
        y = model.attention(x[None])
    assert y.dtype is torch.float32
    assert any("_transformer_encoder_layer_fwd" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_two_models_share_a_part(level: str) -> None:
    shared = nn.Linear(4, 4)
    models = [nn.Sequential(nn.Linear(4, 4), shared) for _ in range(2)]
    amp.initialize(models, opt_level=level, verbosity=0)
    x = torch.randn(2, 4)
    assert {shared(x).dtype, models[0](x).dtype, models[1](x).dtype} == {torch.float32}
    amp.close()
    assert type(shared) is nn.Linear
