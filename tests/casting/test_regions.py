"""`casts="model"`: functions are cast in forwards of the models and in `amp.casts()`, and nowhere else."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_engine import amp
from amp_engine.casting.regions import is_outside
from amp_engine.errors import AmpValueError

from ..support import FUNCTION_LEVELS, HALF, assert_bitwise

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def product() -> torch.dtype:
    """The type in which this thread multiplies FP32 matrices, by function and by operator."""
    by_function, by_operator = F.linear(X, X).dtype, (X @ X.t()).dtype
    assert by_function is by_operator
    return by_function


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())])
        self.norm = nn.LayerNorm(4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        self.seen.append(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def embed(self, x: Tensor) -> Tensor:
        return self.layers[1](self.body(x))


@pytest.fixture(params=FUNCTION_LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(level: str) -> Model:
    torch.manual_seed(0)
    return amp.initialize(Model(), opt_level=level, casts="model", verbosity=0)


def test_functions_are_cast_in_the_forward_alone(model: Model, level: str) -> None:
    assert product() is torch.float32
    assert model(X).dtype is torch.float32
    assert model.seen == [HALF[level]]
    assert product() is torch.float32


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.forward(X),
        lambda model: model.embed(X),
        lambda model: model.body(X),
        lambda model: model.layers[0](X),
        lambda model: model.layers[1].forward(X),
        lambda model: {"x": model(X)}["x"],
    ],
    ids=["forward", "a method", "a part", "a part in a list", "a part's forward", "the model"],
)
def test_what_a_script_calls_is_cast_and_gives_float32(model: Model, level: str, call: Callable[[Any], Tensor]) -> None:
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_: seen.append(product()))
    assert call(model).dtype is torch.float32
    assert set(seen) <= {HALF[level], torch.float32}
    assert torch.equal(call(model), everywhere(model, level, call))


def everywhere(model: Model, level: str, call: Callable[[Any], Tensor]) -> Tensor:
    """Return the result of `call` where functions are cast in the whole process."""
    other = Model()
    other.load_state_dict(model.state_dict())
    amp.close()
    amp.initialize(other, opt_level=level, verbosity=0)
    result = call(other).float()
    amp.close()
    amp.initialize(model, opt_level=level, casts="model", verbosity=0)
    return result


def test_casts_casts_what_is_called_beside_the_model(model: Model, level: str) -> None:
    with amp.casts():
        assert product() is HALF[level]
        assert model.body(X).dtype is HALF[level]  # what is called inside is left as it is
        with amp.casts():
            assert product() is HALF[level]
        assert product() is HALF[level]
    assert product() is torch.float32


def test_disable_casts_wins(model: Model) -> None:
    with amp.casts(), amp.disable_casts():
        assert product() is torch.float32
    with amp.disable_casts(), amp.casts():
        assert product() is torch.float32
    with amp.disable_casts():
        model(X)
    assert model.seen == [torch.float32]


def test_kept_modules_are_not_cast_and_casts_inside_of_them_are(level: str) -> None:
    class Kept(nn.Module):
        def forward(self, x: Tensor) -> Any:
            outside = product()
            with amp.casts():
                return outside, product()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = amp.keep_float(Kept())

        def forward(self, x: Tensor) -> Any:
            return self.kept(x), product()

    model = amp.initialize(Around(), opt_level=level, casts="model", verbosity=0)
    assert model(X) == ((torch.float32, HALF[level]), HALF[level])


@pytest.mark.parametrize("casts", ["everywhere", "model"])
def test_casts_in_a_kept_module_cast_wherever_functions_are_cast(level: str, casts: Any) -> None:
    class Kept(nn.Module):
        def forward(self, x: Tensor) -> Any:
            with amp.casts():
                return product()

    kept = amp.keep_float(Kept())
    amp.initialize(nn.Linear(1, 1), opt_level=level, casts=casts, verbosity=0)
    assert kept(X) is HALF[level]


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_other_levels_cast_no_function_and_take_both_words(level: str) -> None:
    amp.initialize(nn.Linear(4, 4), opt_level=level, casts="model", verbosity=0)
    with amp.casts():
        assert product() is torch.float32
    amp.close()
    with amp.casts():
        assert product() is torch.float32


def test_another_thread_is_outside(model: Model, level: str) -> None:
    found = []
    with amp.casts():
        thread = threading.Thread(target=lambda: found.append((product(), model(X).dtype, *model.seen)))
        thread.start()
        thread.join()
        assert product() is HALF[level]
    assert found == [(torch.float32, torch.float32, HALF[level])]


def test_an_error_in_the_forward_leaves_the_casts(model: Model) -> None:
    for part in (model, model.body):
        with pytest.raises(RuntimeError):
            part(torch.ones(3, 3))
        assert is_outside()
    with pytest.raises(ZeroDivisionError), amp.casts():
        raise ZeroDivisionError
    assert product() is torch.float32


def test_a_forward_of_the_instance_is_inside_too(level: str) -> None:
    model = Model()
    own = model.forward
    model.forward = lambda x: own(x)  # type: ignore[method-assign]
    amp.initialize(model, opt_level=level, casts="model", verbosity=0)
    assert model(X).dtype is torch.float32
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 3))
    assert model.seen == [HALF[level]]
    assert is_outside()
    amp.close()
    model(X)
    assert model.seen[1:] == [torch.float32]


def test_close_gives_the_classes_back(model: Model) -> None:
    amp.close()
    assert [type(module) for module in model.modules()][:4] == [Model, nn.Linear, nn.ModuleList, nn.Linear]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model(X)
    assert model.seen == [torch.float32]


def test_parts_that_are_models_of_their_own_come_back_in_any_order(level: str) -> None:
    for order in ([0, 1], [1, 0]):
        whole = Model()
        amp.initialize([(whole, whole.body)[i] for i in order], opt_level=level, casts="model", verbosity=0)
        assert whole.body(X).dtype is whole(X).dtype is torch.float32
        assert whole.seen == [torch.float32 if order else HALF[level]]  # a model gives FP32, inside of another too
        amp.close()
        assert (type(whole), type(whole.body)) == (Model, nn.Linear)


def test_copies_and_pickles_cast_as_the_model_does(model: Model, level: str) -> None:
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.seen.clear()
        assert torch.equal(other(X), model(X))
        assert other.seen == [HALF[level]]
        amp.close()
        other(X)
        assert other.seen[1:] == [torch.float32]
        amp.initialize(model, opt_level=level, casts="model", verbosity=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_with_the_casts_of_its_forward(level: str, reentrant: bool) -> None:
    class Recomputed(Model):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    gradients = []
    for kind in (Model, Recomputed):
        torch.manual_seed(0)
        model = kind()
        amp.initialize(model, opt_level=level, casts="model", verbosity=0)
        model(X.clone().requires_grad_()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert set(model.seen) == {HALF[level]}
        amp.close()
    assert len(model.seen) == 2
    assert_bitwise(gradients[1], gradients[0])


def test_outputs_are_of_the_type_that_was_asked_for(level: str) -> None:
    model = amp.initialize(Model(), opt_level=level, casts="model", cast_model_outputs=torch.float16, verbosity=0)
    assert model(X).dtype is torch.float16


@pytest.mark.usefixtures("dynamo")
def test_what_is_compiled_knows_each_region(model: Model, level: str) -> None:
    compiled = torch.compile(lambda x: (F.linear(x, X), x @ X.t()), backend="eager")

    def types() -> set[torch.dtype]:
        return {y.dtype for y in compiled(X)}

    for _ in range(2):
        assert types() == {torch.float32}
        with amp.casts():
            assert types() == {HALF[level]}
            with amp.disable_casts():
                assert types() == {torch.float32}
            assert types() == {HALF[level]}
        with amp.disable_casts():
            assert types() == {torch.float32}


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_model_is_cast_inside(model: Model, level: str) -> None:
    expected = model(X)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.seen.clear()
    y = compiled(X)
    y.sum().backward()
    assert set(model.seen) == {HALF[level]}
    assert_bitwise([y, *(p.grad for p in model.parameters())], [expected, *gradients])
    assert is_outside()


@pytest.mark.usefixtures("dynamo")
def test_casts_are_traced_in_a_compiled_function(model: Model, level: str) -> None:

    def loss(x: Tensor) -> Any:
        with amp.casts():
            inside = F.linear(x, X)
        return inside, F.linear(x, X)

    inside, outside = torch.compile(loss, backend="eager")(X)
    assert (inside.dtype, outside.dtype) == (HALF[level], torch.float32)


@pytest.mark.parametrize("first", ["everywhere", "model"])
def test_one_process_casts_in_one_way(level: str, first: Any) -> None:
    second: Any = {"everywhere": "model", "model": "everywhere"}[first]
    model, other = Model(), Model()
    amp.initialize(model, opt_level=level, casts=first, verbosity=0)
    with pytest.raises(AmpValueError, match=rf'casts="{second}".*{level}.*casts="{first}"'):
        amp.initialize(other, opt_level=level, casts=second, verbosity=0)
    assert type(other) is Model
    assert product() is (HALF[level] if first == "everywhere" else torch.float32)
    if first == "model":
        with pytest.raises(AmpValueError, match="amp.close"):
            amp.init()
    amp.close()
    amp.initialize(other, opt_level=level, casts=second, verbosity=0)
    other(X)
    assert other.seen == [HALF[level]]


def test_more_models_may_follow(model: Model, level: str) -> None:
    other = amp.initialize(Model(), opt_level=level, casts="model", verbosity=0)
    model(X)
    other(X)
    assert model.seen == other.seen == [HALF[level]]


@pytest.mark.parametrize("casts", ["models", "", None, True, 1])
def test_other_words_are_refused(casts: Any) -> None:
    model = Model()
    with pytest.raises(AmpValueError, match='neither "everywhere" nor "model"'):
        amp.initialize(model, opt_level="O1", casts=casts, verbosity=0)
    assert type(model) is Model


def test_a_policy_file_says_it(tmp_path: Path, level: str) -> None:
    amp.RunPolicy(level, casts="model").save(tmp_path / "policy.json")
    model = amp.initialize(Model(), policy=tmp_path / "policy.json", verbosity=0)
    assert product() is torch.float32
    model(X)
    assert model.seen == [HALF[level]]
    assert "casts" in str(amp.receipt())


@pytest.mark.parametrize("casts", ["models", 1])
def test_a_policy_takes_no_other_words(casts: Any) -> None:
    with pytest.raises(AmpValueError, match="casts"):
        amp.RunPolicy("O1", casts=casts)
