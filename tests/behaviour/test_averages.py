"""Moving averages of weights: FP32, of the masters, and a word where an average would be low-precision."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from amp_engine import AmpStateError, AmpTypeError, AmpValueError, AmpWarning, Engine, amp
from amp_engine.initialization import half_averages
from tests.models import CNN, LSTM, MLP, NORMED_MLP
from tests.support import (
    FUNCTION_LEVELS,
    LEVELS,
    MASTER_LEVELS,
    assert_bitwise,
    frozen,
    left_alone,
    masters,
    optimizer_values,
    started,
    train,
)

DECAY = 0.9999
LOW_LEVELS = ("O2", "O3", "O5")
AVERAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "equal weights": dict,
    "exponential": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)},
    "exponential, one by one": lambda: {"avg_fn": get_ema_avg_fn(DECAY)},
    "with buffers": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(DECAY), "use_buffers": True},
}


def exact(model: nn.Module) -> nn.Module:
    """A plain FP32 model with what `model` has: masters, as its state dictionary holds them."""
    plain = NORMED_MLP.model(3)
    plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return plain


def state(model: nn.Module) -> dict[str, Tensor]:
    return frozen(dict(model.state_dict()))


# --- amp.averaged_model ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before initialize", "after initialize", "in mid-training"])
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("level", LEVELS)
def test_an_averaged_model_is_that_of_an_fp32_model_with_the_masters_values(
    level: str, average: str, when: str
) -> None:
    model = NORMED_MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def make() -> tuple[nn.Module, AveragedModel]:
        averaged = amp.averaged_model(model, optimizer, **AVERAGES[average]())
        return averaged, AveragedModel(
            exact(model) if level == "O3" or when != "before initialize" else model, **AVERAGES[average]()
        )

    if when == "before initialize":
        averaged, expected = make()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if when == "in mid-training":
        train(NORMED_MLP, model, optimizer, "cc")
    if when != "before initialize":
        averaged, expected = make()
    assert isinstance(averaged, AveragedModel)
    for index in range(6):
        train(NORMED_MLP, model, optimizer, "o" if index == 3 and level in ("O1", "O2") else "c", first=2 + index)
        averaged.update_parameters(model)
        expected.update_parameters(exact(model))
        assert_bitwise(state(averaged), state(expected))
    assert int(averaged.n_averaged) == 6


@pytest.mark.parametrize("task", [CNN, LSTM, NORMED_MLP], ids=["CNN", "LSTM", "NORMED_MLP"])
@pytest.mark.parametrize("level", LEVELS)
def test_an_averaged_model_evaluates_saves_and_loads_as_torchs_of_an_fp32_model(level: str, task: Any) -> None:
    model, optimizer = started(level, task=task)
    averaged = amp.averaged_model(model, optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for index in range(3):
        train(task, model, optimizer, "c", first=index)
        averaged.update_parameters(model)
    saved = state(averaged)
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.float32}
    plain = AveragedModel(task.model(4))
    plain.load_state_dict(saved)
    inputs = task.batch(9)[0]
    with amp.disable_casts():
        outputs = averaged.eval()(inputs)
        assert outputs.dtype == torch.float32
        assert_bitwise(outputs.detach(), plain.eval()(inputs).detach())
        if level in LOW_LEVELS:
            assert averaged(inputs.half()).dtype == torch.float32
    again = amp.averaged_model(model, optimizer)
    again.load_state_dict(plain.state_dict())
    assert_bitwise(state(again), saved)
    update_bn([task.batch(3)[0]], averaged)


@pytest.mark.parametrize("level", LEVELS)
def test_an_averaged_model_goes_on_after_close_and_holds_no_engine(level: str) -> None:
    model, optimizer = started(level)
    averaged = amp.averaged_model(model, optimizer, use_buffers=True)
    train(NORMED_MLP, model, optimizer, "c")
    averaged.update_parameters(model)
    amp.close()
    assert_bitwise(state(averaged.module), state(model))
    averaged.update_parameters(model)
    assert int(averaged.n_averaged) == 2
    twin = pickle.loads(pickle.dumps(averaged.module))
    assert_bitwise(state(copy.deepcopy(averaged).module), state(twin))
    assert not any(module._state_dict_hooks for module in averaged.modules())


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_averaged_model_of_tied_weights_a_part_and_several_optimizers(level: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].weight = model[0].weight
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    with Engine() as engine:
        engine.initialize(model, [first, second], opt_level=level, verbosity=0)
        averaged = engine.averaged_model(model, [first, second])
        part = engine.averaged_model(model[0], (first,))
    assert averaged.module[0].weight is averaged.module[1].weight
    assert averaged.module[1].bias.dtype == part.module.weight.dtype == torch.float32
    assert part(torch.ones(2, 8)).dtype == torch.float32


def test_what_is_no_model_or_no_optimizer_of_this_engine_is_refused() -> None:
    model, optimizer = started("O2")
    with pytest.raises(AmpTypeError, match=r"averaged_model\(\) takes a torch.nn.Module, not a list"):
        amp.averaged_model([model], optimizer)  # type: ignore[arg-type]
    with pytest.raises(AmpTypeError, match="was not passed to amp.initialize"):
        amp.averaged_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(AmpTypeError, match="optimizers must be"):
        amp.averaged_model(model, model.parameters())  # type: ignore[arg-type]


def test_without_initialize_or_not_enabled_it_is_torchs() -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert_bitwise(state(amp.averaged_model(model)), state(AveragedModel(model)))
    amp.initialize(model, optimizer, enabled=False)
    assert_bitwise(state(amp.averaged_model(model, optimizer)), state(AveragedModel(model)))


# --- amp.averaged_weights -------------------------------------------------------------------------


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def trained_with_average(level: str, **keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    model, optimizer = started(level, adamw, **keywords)
    averaged = amp.averaged_model(model, optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for index in range(3):
        train(NORMED_MLP, model, optimizer, "c", first=index)
        averaged.update_parameters(model)
    return model, optimizer, averaged


@pytest.mark.parametrize("level", [*LEVELS, "O5, split"])
def test_a_model_evaluates_with_the_average_and_trains_on_as_if_it_had_not(level: str) -> None:
    def run(evaluates: bool) -> Any:
        keywords = {"master_weights": "split"} if level == "O5, split" else {}
        model, optimizer, averaged = trained_with_average(level[:2], **keywords)
        inputs = NORMED_MLP.batch(9)[0]
        model.eval()
        outputs = model(inputs).detach()
        if evaluates:
            with amp.averaged_weights(model, averaged):
                named = {**dict(averaged.module.named_parameters()), **dict(averaged.module.named_buffers())}
                for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                    assert_bitwise(tensor.detach(), named[name].detach().to(tensor.dtype))
                found = model(inputs).detach()
                assert not torch.equal(found, outputs)
                if level in FUNCTION_LEVELS:
                    assert_bitwise(found, averaged.eval()(inputs).detach())  # no copy of a weight is stale
                model.train()(inputs)  # moves the running statistics
        assert_bitwise(model.eval()(inputs).detach(), outputs)
        train(NORMED_MLP, model.train(), optimizer, "cc", first=3)
        return frozen([dict(model.state_dict()), optimizer_values(optimizer), masters(optimizer)])

    expected = run(evaluates=False)
    amp.close()
    assert_bitwise(run(evaluates=True), expected)


@pytest.mark.filterwarnings("ignore:A moving average of this model was made as a copy")
@pytest.mark.parametrize("kind", ["averaged", "copy"])
@pytest.mark.parametrize("level", LEVELS)
def test_an_expanded_buffer_takes_the_average_and_comes_back(level: str, kind: str) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("odd", torch.full((1, 4), 2.0).expand(3, 4))
    optimizer = adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level)
    averaged = amp.averaged_model(model, optimizer, use_buffers=True) if kind == "averaged" else copy.deepcopy(model)
    rows = model.odd[:1] if 0 in model.odd.stride() else model.odd  # a cast to half writes it out
    for index in range(2) if kind == "averaged" else ():
        rows.fill_(2.0 + index)
        averaged.update_parameters(model)
    rows.fill_(5.0)
    expected = 2.0 if kind == "copy" else float(averaged.module.odd[0, 0])
    assert expected < 3.0
    with amp.averaged_weights(model, averaged):
        assert bool((model.odd == expected).all())
    assert bool((model.odd == 5.0).all())


@pytest.mark.parametrize("level", LEVELS)
def test_an_error_in_the_body_leaves_the_model_as_it_was(level: str) -> None:
    model, _, averaged = trained_with_average(level)
    before = state(model)
    with pytest.raises(KeyError, match="of the body"), amp.averaged_weights(model, averaged):
        raise KeyError("of the body")
    assert_bitwise(state(model), before)


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_in_the_body_is_told(level: str) -> None:
    model, optimizer, averaged = trained_with_average(level)
    with (
        pytest.raises(AmpStateError, match="5 weights were written in the body"),
        amp.averaged_weights(model, averaged),
    ):
        train(NORMED_MLP, model, optimizer, "c", first=3)


def test_what_is_no_average_of_the_model_is_refused() -> None:
    model, _, averaged = trained_with_average("O2")
    for other, error, message in (
        (MLP.model(), AmpValueError, "of 8 weights and buffers, and an average of 4"),
        (list(averaged.parameters()), AmpTypeError, r"averaged_weights\(\) takes .*, not a list"),
    ):
        with left_alone(model), pytest.raises(error, match=message), amp.averaged_weights(model, other):
            pytest.fail("the body ran")


# --- other libraries' averages --------------------------------------------------------------------


class ModelEma:
    """timm's: its name tells it, by one word of several."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model)


class Follower(ModelEma):
    """The name of its base tells it."""


class ExponentialMovingAverage(AveragedModel):
    """torchvision's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)


def helper(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def by_line(model: nn.Module) -> None:
    teacher = copy.deepcopy(model)
    del teacher


def make_ema(model: nn.Module) -> nn.Module:
    return helper(model)


COPYING: dict[str, Callable[[nn.Module], Any]] = {
    "AveragedModel": AveragedModel,
    "torchvision": ExponentialMovingAverage,
    "timm": ModelEma,
    "a class derived": Follower,
    "by the line": by_line,
    "by a function": make_ema,
}


@pytest.mark.parametrize("how", COPYING)
@pytest.mark.parametrize("level", LEVELS)
def test_who_averages_a_low_precision_copy_is_told_what_to_write(level: str, how: str) -> None:
    model, _ = started(level)
    if level not in LOW_LEVELS:
        COPYING[how](model)
        return
    with pytest.warns(UserWarning, match=r"moving average.*amp.averaged_model\(model, optimizer") as caught:
        COPYING[how](model)
    assert [warning.filename for warning in caught] == [__file__]
    amp.close()
    COPYING[how](model)


@pytest.mark.parametrize("level", LEVELS)
def test_other_copies_are_made_in_silence(level: str) -> None:
    model, _ = started(level)
    best = copy.deepcopy(model)
    schema = copy.deepcopy([model, {"demand": best}])
    assert schema[0] is not model
    helper(model)


def follow(level: str) -> None:
    """Train a model, and have another follow its weights, which computes, too."""
    model, follower = MLP.model(), MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize([model, follower], optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    follower.load_state_dict(model.state_dict())
    for index in range(8):
        MLP.loss(model, MLP.batch(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            MLP.loss(follower, MLP.batch(index))
            for own, other in zip(follower.parameters(), model.parameters(), strict=True):
                own.data.mul_(0.9).add_(other.data, alpha=0.1)


def step_by_hand(level: str) -> None:
    """Train a model without an optimizer."""
    model = MLP.model()
    amp.initialize(model, opt_level=level, loss_scale=1.0, verbosity=0)
    for index in range(8):
        MLP.loss(model, MLP.batch(index)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.01)
                p.grad = None


@pytest.mark.parametrize("run", [follow, step_by_hand])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_half_parameters_that_a_script_writes_and_no_optimizer_steps_are_said_once(level: str, run: Any) -> None:
    with pytest.warns(AmpWarning, match=r"of Mlp that no optimizer steps, .* were written in .*follows") as caught:
        run(level)
    assert len(caught) == 1
    assert caught[0].filename != half_averages.__file__


def test_a_model_goes_on_where_that_is_an_error() -> None:
    model = MLP.model()
    amp.initialize(model, opt_level="O5", verbosity=0)
    raised = 0
    for index in range(12):
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            try:
                MLP.loss(model, MLP.batch(index))
            except AmpWarning:
                raised += 1
            for p in model.parameters() if index < 6 else ():
                p.mul_(0.5)
    assert raised == 1


def test_a_model_in_functorch_and_one_with_a_sparse_parameter_run() -> None:
    model = nn.Linear(4, 4)
    model.sparse = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    amp.initialize(model, opt_level="O5", verbosity=0)
    params = {name: p.detach() for name, p in model.named_parameters() if name != "sparse"}
    x = torch.ones(2, 4)
    for _ in range(3):
        grads = torch.func.grad(lambda own: torch.func.functional_call(model, own, (x,)).sum())(params)
        assert_bitwise(grads["bias"], torch.full((4,), 2.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_steps_and_checkpoints_are_no_such_writes(level: str) -> None:
    model = MLP.model()
    amp.initialize(model, opt_level=level, loss_scale=1.0, verbosity=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(8):
            MLP.loss(model, MLP.batch(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_masters_that_were_clipped_after_the_step_do_not_replace_the_average(level: str) -> None:
    model, optimizer, averaged = trained_with_average(level)
    with torch.no_grad():
        for weight in amp.master_params(optimizer):
            weight.clamp_(-0.01, 0.01)
    with amp.averaged_weights(model, averaged):
        model.eval()(NORMED_MLP.batch(9)[0])
        for weight, average in zip(model.parameters(), averaged.module.parameters(), strict=True):
            assert_bitwise(weight.detach(), average.detach().to(weight.dtype))
    assert all(p.abs().max() <= 0.0101 for p in model.parameters())
