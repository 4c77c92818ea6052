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
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from amp_engine import AmpGradientWarning, AmpStateError, amp
from tests.models import MLP, NORMED_MLP
from tests.support import (
    CAST_LEVELS,
    LEVELS,
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


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("level", LEVELS)
def test_distributed_data_parallel_around_the_returned_model_trains(level: str) -> None:
    """The wrapper's broadcast writes the half parameters, so masters may start from the rounded values."""
    plain, _ = trained(level)
    parallel, saved = trained(level, DistributedDataParallel)
    tolerance = 1e-2 if level in ("O3", "O4", "O5") else 1e-3
    for ours, theirs in zip(parallel, plain, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)
    assert all(name.startswith("module.") for name in saved)
    assert {value.dtype for value in saved.values()} == {torch.float32, torch.int64}
    if level in MASTER_LEVELS:
        assert_bitwise(saved["module.0.weight"], parallel[0])


@pytest.mark.parametrize("level", LEVELS)
def test_data_parallel_on_a_cpu_is_transparent(level: str) -> None:
    assert_bitwise(trained(level, DataParallel)[0], trained(level)[0])


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_moves_between_the_wrapped_and_the_bare_model(level: str) -> None:
    model = NORMED_MLP.model()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    holder = nn.ModuleDict({"net": model})
    train(NORMED_MLP, model, optimizer, "cc")
    saved = frozen(dict(holder.state_dict()))
    exact = masters(optimizer)
    train(NORMED_MLP, model, optimizer, "c", first=2)
    holder.load_state_dict(saved)
    assert_bitwise(masters(optimizer), exact)
    assert_bitwise({name.removeprefix("net."): value for name, value in saved.items()}, dict(model.state_dict()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("level", CAST_LEVELS)
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


def of_parts(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.heads[0](model.norm(model.encoder(x)))
    return y


def initialized_parts(level: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = Parts()
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, verbosity=0)
    return model, torch.randn(8, 4)


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_forward_called_directly_is_cast_as_the_model_is(level: str) -> None:
    model, x = initialized_parts(level)
    half = model.heads[0].weight.dtype
    for call in (lambda: model.forward(x), lambda: model.forward(x=x), lambda: type(model).forward(model, x)):
        y = call()["y"]
        assert (model.got, y.dtype) == (half, torch.float32)
        assert_bitwise(y, model(x)["y"])
        model.got = None


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_parts_called_by_a_script_are_cast_as_the_model_is(level: str) -> None:
    model, x = initialized_parts(level)
    y = of_parts(model, x)
    assert y.dtype is torch.float32
    assert_bitwise(y, model(x)["y"])
    half = model.heads[0].weight.dtype
    assert model.encoder(x.to(half)).dtype is torch.float32
    with pytest.raises(RuntimeError, match="shapes"):
        model.encoder(torch.randn(3, 5))
    assert not model.encoder._forward_hooks


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_layers_of_a_part_take_what_the_forward_gives_in_the_type_of_their_weights(level: str) -> None:
    class Floating(Parts):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return self.encoder(x.float())

    model = amp.initialize(Floating(), opt_level=level, verbosity=0)
    given = torch.randn(8, 4)
    for call in (model, model.forward):
        assert call(given).dtype is torch.float32
        assert_bitwise(call(given), call(given.to(model.encoder[0].weight.dtype)))


@pytest.mark.parametrize("level", CAST_LEVELS)
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


@pytest.mark.parametrize("level", CAST_LEVELS)
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


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_a_forward_that_is_put_on_the_instance_is_cast_when_the_model_is_called(level: str) -> None:
    model, x = initialized_parts(level)
    expected = model(x)["y"]
    for forward in (lambda x: Parts.forward(model, x), model.forward):  # as frameworks wrap it
        model.forward = forward
        y = model(x)["y"]
        assert (model.got, y.dtype) == (model.heads[0].weight.dtype, torch.float32)
        assert_bitwise(y, expected)
        del model.forward


@pytest.mark.parametrize(("level", "casts"), [*((level, "everywhere") for level in CAST_LEVELS), ("O1", "model")])
def test_a_forward_that_was_kept_is_the_plain_one_after_close(level: str, casts: str) -> None:
    model, x = Parts().eval(), torch.randn(4, 4)
    amp.initialize(model, opt_level=level, casts=casts, verbosity=0)
    kept = [model.forward, model.encoder.forward]  # as Accelerate's hooks do
    amp.close()
    assert_bitwise([forward(x) for forward in kept], [model(x), model.encoder(x)])


@pytest.mark.parametrize("level", CAST_LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_state_dict_takes_a_prefix_and_a_destination(level: str) -> None:
    model = MLP.model()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    destination: dict[str, Any] = {"mine": 1}
    assert model.state_dict(destination=destination, prefix="net.") is destination
    assert list(destination) == ["mine", "net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    assert destination["net.0.weight"].dtype == torch.float32
    assert_bitwise(destination["net.0.weight"], model.state_dict()["0.weight"])


@pytest.mark.parametrize("level", LEVELS)
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
def test_a_strict_load_that_fails_on_a_missing_key_says_so(level: str) -> None:
    model = NORMED_MLP.model()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"3.bias": torch.zeros(4)})


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


@pytest.mark.parametrize("level", LEVELS)
def test_one_optimizer_over_two_models(level: str) -> None:
    first, second = MLP.model(0), MLP.model(1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    amp.initialize([first, second], optimizer, opt_level=level, verbosity=0)
    before = masters(optimizer)
    backward(MLP.loss(first, MLP.batch(0)) + MLP.loss(second, MLP.batch(1)), optimizer)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, masters(optimizer), strict=True))


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_zeroed_between_the_exit_and_the_step_are_not_stepped(level: str, set_to_none: bool) -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = masters(optimizer)
    backward(MLP.loss(model, MLP.batch()), optimizer)
    optimizer.zero_grad(set_to_none=set_to_none)
    with pytest.warns(AmpGradientWarning, match="finds no gradient") if set_to_none else contextlib.nullcontext():
        optimizer.step()
    assert_bitwise(masters(optimizer), before)


@pytest.mark.parametrize("level", LEVELS)
def test_zeroing_the_model_instead_of_the_optimizer_works(level: str) -> None:
    def run(*, through_model: bool) -> list[Tensor]:
        model = NORMED_MLP.model()
        optimizer = sgd(model)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for index in range(3):
            (model if through_model else optimizer).zero_grad()
            backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer)
            optimizer.step()
        values = masters(optimizer)
        amp.close()
        return values

    assert_bitwise(run(through_model=True), run(through_model=False))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_two_contexts_may_be_open_at_once_for_two_optimizers(level: str) -> None:
    models = [MLP.model(0), MLP.model(1)]
    optimizers = [sgd(model) for model in models]
    amp.initialize(models, optimizers, opt_level=level, num_losses=2, verbosity=0)
    losses = [MLP.loss(model, MLP.batch()) for model in models]
    with (
        amp.scale_loss(losses[0], optimizers[0], loss_id=0) as first,
        amp.scale_loss(losses[1], optimizers[1], loss_id=1) as second,
    ):
        first.backward()
        second.backward()
    ours = [[p.grad.clone() for p in amp.master_params(optimizer)] for optimizer in optimizers]
    for index in range(2):
        optimizers[index].zero_grad()
        backward(MLP.loss(models[index], MLP.batch()), optimizers[index], loss_id=index)
        assert_bitwise(ours[index], [p.grad for p in amp.master_params(optimizers[index])])


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


def test_a_listed_optimizer_that_amp_does_not_know_is_named() -> None:
    model, stranger = MLP.model(0), MLP.model(1)
    amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    unknown = torch.optim.Adagrad(stranger.parameters())
    with (
        pytest.raises((RuntimeError, TypeError, ValueError), match="Adagrad"),
        amp.scale_loss(MLP.loss(stranger, MLP.batch()), unknown),
    ):
        pass


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
def test_a_body_without_a_backward_counts_as_clean(level: str) -> None:
    model = MLP.model()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = masters(optimizer)
    with amp.scale_loss(MLP.loss(model, MLP.batch()), optimizer):
        pass
    with pytest.warns(AmpGradientWarning, match="no backward of the scaled loss ran"):
        optimizer.step()
    assert_bitwise(masters(optimizer), before)
    assert scaler_numbers() == (65536.0, 1)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_taken_by_autograd_grad_are_scaled_and_touch_no_parameter(level: str) -> None:
    model = MLP.model()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scale, _ = scaler_numbers()
    with amp.scale_loss(MLP.loss(model, MLP.batch()), optimizer) as scaled_loss:
        grads = torch.autograd.grad(scaled_loss, list(model.parameters()))
    backward(MLP.loss(model, MLP.batch()), optimizer)
    for grad, master in zip(grads, amp.master_params(optimizer), strict=True):
        torch.testing.assert_close(grad.float() / scale, master.grad.float())


@pytest.mark.parametrize("level", LEVELS)
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


def move(param: nn.Parameter) -> None:
    param.data = param.data.clone()


def write(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.copy_(param * 0.5)


def write_the_same(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.copy_(param.clone())


@pytest.mark.parametrize("change", [move, write, write_the_same])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_half_parameter_moved_or_written_between_steps_trains_on(level: str, change: Any) -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(MLP, model, optimizer, "c")
    for param in model.parameters():
        change(param)
    # Where the values are the same the masters keep theirs.
    start = [param.detach().float() for param in model.parameters()] if change is write else masters(optimizer)
    optimizer.zero_grad()
    backward(MLP.loss(model, MLP.batch(1)), optimizer)
    gradients = [master.grad.clone() for master in amp.master_params(optimizer)]
    optimizer.step()
    expected = [torch.add(value, grad, alpha=-0.1) for value, grad in zip(start, gradients, strict=True)]
    assert_bitwise(masters(optimizer), expected)
    train(MLP, model, optimizer, "cc", first=2)
    for param, master in zip(model.parameters(), masters(optimizer), strict=True):
        assert_bitwise(param.detach(), master.to(param.dtype))


@pytest.mark.parametrize("moment", ["before any step", "between steps", "between exit and step"])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_master_written_by_the_user_keeps_what_was_written(level: str, moment: str) -> None:
    """Clipping or averaging weights through `master_params`, as apex allowed."""
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if moment == "between steps":
        train(MLP, model, optimizer, "cc")
    if moment == "between exit and step":
        backward(MLP.loss(model, MLP.batch(2)), optimizer)
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.clamp_(-0.01, 0.01)
    start = masters(optimizer)
    if moment != "between exit and step":
        backward(MLP.loss(model, MLP.batch(2)), optimizer)
    gradients = [master.grad.clone() for master in amp.master_params(optimizer)]
    optimizer.step()
    expected = [torch.add(value, grad, alpha=-0.1) for value, grad in zip(start, gradients, strict=True)]
    assert_bitwise(masters(optimizer), expected)
    for param, master in zip(model.parameters(), masters(optimizer), strict=True):
        assert_bitwise(param.detach(), master.to(param.dtype))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_backward_through_an_older_graph_survives_reading_the_masters(level: str) -> None:
    """Reading, clipping or stepping other parameters between forward and backward writes no half weight."""
    model = MLP.model()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    loss = MLP.loss(model, MLP.batch())
    list(amp.master_params(optimizer))
    model.state_dict()
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.mul_(1.0)
    backward(loss, optimizer)
    optimizer.step()
