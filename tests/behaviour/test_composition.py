"""Models and optimizers put together as people do: wrapped after `initialize`, shared, tied, parametrized, nested."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from amp_engine import AmpStateError, amp
from tests.models import MLP, NORMED_MLP
from tests.support import (
    MASTER_LEVELS,
    assert_bitwise,
    backward,
    entries_of,
    frozen,
    masters,
    scaler_numbers,
    train,
)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def trained(level: str, wrap: Any = lambda model: model) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = NORMED_MLP.model()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wrapped = wrap(model)
    train(NORMED_MLP, wrapped, optimizer, "cccc")
    values = masters(optimizer), frozen(dict(wrapped.state_dict()))
    del wrapped
    amp.close()
    return values


# --- wrapped after initialize ---------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_data_parallel_on_a_cpu_is_transparent(level: str) -> None:
    assert_bitwise(trained(level, DataParallel)[0], trained(level)[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_model_is_traced_with_its_casts_and_scripted_after_close(level: str) -> None:
    model, (x, _) = NORMED_MLP.model().eval(), NORMED_MLP.batch()
    amp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises(AmpStateError, match=r"Call torch.jit.trace\(model, example_inputs\).*or amp.close\(\)"):
        torch.jit.script(model)
    assert_bitwise(torch.jit.trace(model, x)(x), model(x))
    amp.close()
    assert_bitwise(torch.jit.script(model)(x), model(x))


# --- called past the model ------------------------------------------------------------------------


class Parts(nn.Module):
    """Notes the type that its forward gets."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.norm = nn.BatchNorm1d(4)
        self.heads = nn.ModuleList([nn.Linear(4, 2)])
        self.got: torch.dtype | None = None

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.got = x.dtype
        return {"y": self.heads[0](self.norm(self.encoder(x))) * scale}


def initialized_parts(level: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = Parts()
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, verbosity=0)
    return model, torch.randn(8, 4)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_forward_called_directly_is_cast_as_the_model_is(level: str) -> None:
    model, x = initialized_parts(level)
    half = model.heads[0].weight.dtype
    for call in (lambda: model.forward(x), lambda: model.forward(x=x), lambda: type(model).forward(model, x)):
        y = call()["y"]
        assert (model.got, y.dtype) == (half, torch.float32)
        assert_bitwise(y, model(x)["y"])
        model.got = None


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_layers_of_a_part_take_what_the_forward_gives_in_the_type_of_their_weights(level: str) -> None:
    class Floating(Parts):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return self.encoder(x.float())

    model = amp.initialize(Floating(), opt_level=level, verbosity=0)
    given = torch.randn(8, 4)
    for call in (model, model.forward):
        assert call(given).dtype is torch.float32
        assert_bitwise(call(given), call(given.to(model.encoder[0].weight.dtype)))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_every_hook_of_a_users_sees_the_types_outside_of_the_casts(level: str) -> None:
    seen: list[torch.dtype] = []

    def hook(model: nn.Module) -> None:
        model.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        model.register_forward_hook(lambda _, args, output: seen.append(output["y"].dtype))

    model = Parts()
    hook(model)
    amp.initialize(model, opt_level=level, verbosity=0)
    hook(model)
    model(torch.randn(8, 4))
    assert seen == 4 * [torch.float32]


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("copied", ["copy", "deepcopy", "pickle", "replica"])
def test_copies_of_a_model_cast_at_forward_and_other_instances_do_not(level: str, copied: str) -> None:
    model, x = initialized_parts(level)
    twin = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "replica": lambda model: model._replicate_for_data_parallel(),
    }[copied](model.eval())
    assert type(twin) is type(model)
    assert_bitwise(twin.forward(x)["y"], model(x)["y"])
    assert type(model)().eval()(x)["y"].dtype is torch.float32


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_forward_that_is_put_on_the_instance_is_cast_when_the_model_is_called(level: str) -> None:
    model, x = initialized_parts(level)
    expected = model(x)["y"]
    for forward in (lambda x: Parts.forward(model, x), model.forward):  # as frameworks wrap it
        model.forward = forward
        y = model(x)["y"]
        assert (model.got, y.dtype) == (model.heads[0].weight.dtype, torch.float32)
        assert_bitwise(y, expected)
        del model.forward


@pytest.mark.parametrize(("level", "casts"), [("O0", "everywhere"), ("O2", "everywhere"), ("O1", "model")])
def test_a_forward_that_was_kept_is_the_plain_one_after_close(level: str, casts: str) -> None:
    model, x = Parts().eval(), torch.randn(4, 4)
    amp.initialize(model, opt_level=level, casts=casts, verbosity=0)
    kept = [model.forward, model.encoder.forward]  # as Accelerate's hooks do
    amp.close()
    assert_bitwise([forward(x) for forward in kept], [model(x), model.encoder(x)])


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_class_a_model_gets_looks_like_its_own_which_close_gives_back(level: str) -> None:
    registered = []

    class Registering(Parts):
        def __init_subclass__(cls, **options: Any) -> None:
            registered.append(cls)

    model = Registering()
    before = dict(vars(model))
    amp.initialize(model, opt_level=level, verbosity=0)
    kind = type(model)
    assert isinstance(model, Registering)
    assert not registered
    assert (kind.__name__, kind.__qualname__, kind.__module__) == (
        Registering.__name__,
        Registering.__qualname__,
        Registering.__module__,
    )
    assert inspect.signature(model.forward) == inspect.signature(Parts().forward)
    assert inspect.getfullargspec(model.forward).args == ["self", "x", "scale"]
    amp.initialize(model, opt_level=level, verbosity=0)
    assert type(model) is kind
    amp.close()
    assert type(model) is Registering
    assert vars(model).keys() == before.keys()


class Posing:
    """Says that it is of the class of the model that it holds, as the wrapper of Classy Vision's models does."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.model)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["model"], name)

    def __call__(self, x: Tensor) -> Any:
        return self.forward(x)

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_wrapper_that_says_it_is_of_its_models_class_trains_like_the_model(level: str) -> None:
    expected, _ = trained(level)
    model: Any = Posing(NORMED_MLP.model())
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(NORMED_MLP, model, optimizer, "cccc")
    for ours, theirs in zip(masters(optimizer), expected, strict=True):
        assert_bitwise(ours, theirs)
    amp.close()
    assert type(model) is Posing


# --- state_dict in all its forms ------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_state_dict_takes_a_prefix_and_a_destination(level: str) -> None:
    model = MLP.model()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    destination: dict[str, Any] = {"mine": 1}
    assert model.state_dict(destination=destination, prefix="net.") is destination
    assert list(destination) == ["mine", "net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    assert destination["net.0.weight"].dtype == torch.float32
    assert_bitwise(destination["net.0.weight"], model.state_dict()["0.weight"])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_state_dict_with_keep_vars_gives_the_parameters_themselves(level: str) -> None:
    model = MLP.model()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_partial_checkpoint_fills_only_the_masters_that_it_names(level: str) -> None:
    model = NORMED_MLP.model()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(NORMED_MLP, model, optimizer, "cc")
    before = masters(optimizer)
    incoming = {"3.bias": torch.full((4,), 0.1), "nobody": torch.ones(1)}
    result = model.load_state_dict(incoming, strict=False)
    assert result.unexpected_keys == ["nobody"]
    assert_bitwise(masters(optimizer), [*before[:4], incoming["3.bias"]])


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_frozen_weights_and_buffers_are_saved_widened(level: str) -> None:
    model = MLP.model()
    model[0].requires_grad_(False)
    model.register_buffer("offset", torch.full((2,), 0.1))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    saved = model.state_dict()
    half = model[0].weight.dtype
    assert_bitwise(saved["offset"], torch.full((2,), 0.1).to(half).float())
    assert_bitwise(saved["0.weight"], model[0].weight.detach().float())
    assert_bitwise(saved["2.weight"], masters(optimizer)[0])


# --- parameters that are shared, tied or parametrized ---------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_models_may_share_a_layer(level: str) -> None:
    trunk = nn.Linear(8, 8)
    first, second = nn.Sequential(trunk, nn.Linear(8, 4)), nn.Sequential(trunk, nn.Linear(8, 4))
    optimizers = [sgd(first), torch.optim.SGD(second[1].parameters(), lr=0.1)]
    amp.initialize([first, second], optimizers, opt_level=level, verbosity=0)
    for index in range(3):
        before = masters(optimizers[0])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = MLP.loss(first, MLP.batch(index)) + MLP.loss(second, MLP.batch(index))
        backward(loss, optimizers)
        for optimizer in optimizers:
            optimizer.step()
        assert not torch.equal(masters(optimizers[0])[0], before[0])
    amp.close()
    assert first[0] is second[0] is trunk
    assert trunk.weight.dtype == torch.float32
    assert any(param is trunk.weight for param in entries_of(optimizers[0]))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_weight_normed_layer_trains_saves_and_comes_back(level: str) -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 4))
    optimizer = sgd(model)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(MLP, model, optimizer, "cccc")
    saved = model.state_dict()
    assert list(saved) == list(start)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert not any(torch.equal(saved[name], start[name]) for name in start)
    model.load_state_dict(start)
    if level in MASTER_LEVELS:
        names = [name for name, _ in model.named_parameters()]
        assert_bitwise(masters(optimizer), [start[name] for name in names])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(level: str, reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self, *, active: bool) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
            self.active = active

        def body(self, inputs: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(inputs)))

        def forward(self, inputs: Tensor) -> Tensor:
            if not self.active:
                return self.body(inputs)
            inputs = inputs.detach().requires_grad_()
            return checkpoint(self.body, inputs, use_reentrant=reentrant)

    def run(*, active: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Recomputed(active=active)
        optimizer = sgd(model)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        train(MLP, model, optimizer, "ccc")
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run(active=True), run(active=False))


# --- steps and zeroing in every order -------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_context_that_cannot_be_entered_leaves_the_engine_at_work(level: str) -> None:
    model, stranger = MLP.model(0), MLP.model(1)
    optimizer, unknown = sgd(model), sgd(stranger)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    loss = MLP.loss(model, MLP.batch())
    for optimizers in ([optimizer, unknown], [optimizer, "sgd"], None):
        with pytest.raises((RuntimeError, TypeError, ValueError, AttributeError)), amp.scale_loss(loss, optimizers):
            pass
    losses = train(MLP, model, optimizer, "c" * 8)
    assert losses[-1] < losses[0]
    assert scaler_numbers() == (65536.0, 8)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_listed_twice_does_not_wedge_the_engine(level: str) -> None:
    model = MLP.model()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with contextlib.suppress(RuntimeError):
        backward(MLP.loss(model, MLP.batch()), [optimizer, optimizer])
    losses = train(MLP, model, optimizer, "c" * 8)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_moving_the_model_between_training_and_eval_changes_nothing(level: str) -> None:
    def run(*, evaluating: bool) -> list[Tensor]:
        model = NORMED_MLP.model()
        optimizer = sgd(model)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for index in range(4):
            train(NORMED_MLP, model, optimizer, "c", first=index)
            if evaluating:
                model.eval()
                for mode in (torch.no_grad(), torch.inference_mode()):
                    with mode:
                        model(NORMED_MLP.batch(20)[0])
                model.train()
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run(evaluating=True), run(evaluating=False))
