"""Moving averages of weights: FP32, of the masters, and a word where an average would be low-precision."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from amp_engine import AmpStateError, AmpTypeError, AmpValueError, Engine, amp
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


def exact(model: nn.Module, task: Any = NORMED_MLP) -> nn.Module:
    """A plain FP32 model with what `model` has: masters, as its state dictionary holds them."""
    plain = task.model(3)
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


@pytest.mark.parametrize("level", LEVELS)
def test_a_slow_average_moves_as_far_as_it_would_in_fp32(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    averaged = amp.averaged_model(model, optimizer, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(model)
    start = state(averaged)["module.0.weight"]
    far = start + 1.0
    for param in model.parameters():
        with torch.no_grad():
            param.add_(1.0)
    for _ in range(300):
        averaged.update_parameters(model)
    moved = state(averaged)["module.0.weight"] - start
    torch.testing.assert_close(moved, (1 - DECAY**300) * (far - start), rtol=0.01, atol=0)


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
def test_an_averaged_model_neither_trains_nor_changes_its_model(level: str) -> None:
    model, optimizer = started(level)
    train(NORMED_MLP, model, optimizer, "c")
    values, exact_values = frozen(dict(model.named_parameters())), masters(optimizer)
    averaged = amp.averaged_model(model, optimizer)
    averaged.update_parameters(model)
    assert all(param.grad is None for param in averaged.parameters())
    averaged.load_state_dict(AveragedModel(NORMED_MLP.model(8)).state_dict())
    assert_bitwise(frozen(dict(model.named_parameters())), values)
    assert_bitwise(masters(optimizer), exact_values)
    kept = state(averaged)
    train(NORMED_MLP, model, optimizer, "c")
    assert_bitwise(state(averaged), kept)


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


def test_an_average_of_torchs_and_a_copy_stand_in_too() -> None:
    model = MLP.model()
    other = MLP.model(5)
    for averaged in (AveragedModel(other), other):
        with left_alone(model), amp.averaged_weights(model, averaged):
            assert_bitwise(state(model), state(other))
            amp_saved = amp.export_state_dict(model)
        assert_bitwise(dict(amp_saved), state(other))


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


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_that_is_asked_about_does_not_move_the_average(level: str) -> None:
    model, optimizer, averaged = trained_with_average(level)
    for index, outcome in enumerate("oco", start=3):
        before = state(averaged)
        train(NORMED_MLP, model, optimizer, outcome, first=index)
        if not amp.last_step(optimizer).skipped:
            averaged.update_parameters(model)
        assert (int(averaged.n_averaged) != int(before["n_averaged"])) == (outcome == "c")
        if outcome == "o":
            assert_bitwise(state(averaged), before)


# --- other libraries' averages --------------------------------------------------------------------


class ModelEma:
    """timm's first: a copy, and its state dictionary by name."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.ema = copy.deepcopy(model)
        self.ema.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        values = model.state_dict()
        for name, average in self.ema.state_dict().items():
            value = values[name].detach()
            average.copy_(average * self.decay + (1.0 - self.decay) * value)

    def state(self) -> dict[str, Tensor]:
        return state(self.ema)


class ModelEmaV2(nn.Module):
    """timm's second: a submodule, and state dictionaries in order."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            average.copy_(self.decay * average + (1.0 - self.decay) * value)

    def state(self) -> dict[str, Tensor]:
        return state(self.module)


class ModelEmaV3(ModelEmaV2):
    """timm's third: in one go."""

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        both = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        pairs = [pair for pair in both if pair[0].is_floating_point()]
        torch._foreach_lerp_([a for a, _ in pairs], [value for _, value in pairs], weight=1.0 - self.decay)


class EMAModel:
    """diffusers': copies of parameters, from whatever gives them."""

    def __init__(self, parameters: Iterable[Tensor], decay: float, foreach: bool = False) -> None:
        self.shadow = [p.clone().detach() for p in parameters]
        self.decay, self.foreach = decay, foreach

    @torch.no_grad()
    def step(self, parameters: Iterable[Tensor]) -> None:
        weight, params = 1 - self.decay, list(parameters)
        if self.foreach:
            torch._foreach_sub_(self.shadow, torch._foreach_sub(self.shadow, params), alpha=weight)
            return
        for average, param in zip(self.shadow, params, strict=True):
            average.sub_(weight * (average - param))

    def copy_to(self, parameters: Iterable[Tensor]) -> None:
        for average, param in zip(self.shadow, list(parameters), strict=True):
            param.data.copy_(average.to(param.device).data)


class ExponentialMovingAverage(AveragedModel):
    """torchvision's."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


class MeanTeacher(nn.Module):
    """A network that follows another one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.copied = copy.deepcopy(model)


def helper(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def by_line(model: nn.Module) -> None:
    ema_model = copy.deepcopy(model)
    del ema_model


def make_ema(model: nn.Module) -> nn.Module:
    return helper(model)


COPYING: dict[str, Callable[[nn.Module], Any]] = {
    "AveragedModel": AveragedModel,
    "torchvision": lambda model: ExponentialMovingAverage(model, DECAY),
    "timm 1": lambda model: ModelEma(model, DECAY),
    "timm 2": lambda model: ModelEmaV2(model, DECAY),
    "timm 3": lambda model: ModelEmaV3(model, DECAY),
    "teacher": MeanTeacher,
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


class Plain:
    def __init__(self, make: Callable[[nn.Module], Any], level: str) -> None:
        self.model, self.reference = NORMED_MLP.model(), NORMED_MLP.model()
        self.ema, self.expected = make(self.model), make(self.reference)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0)

    def steps(self) -> Iterator[None]:
        for index in range(5):
            train(NORMED_MLP, self.model, self.optimizer, "c", first=index)
            self.reference.load_state_dict({name: value.clone() for name, value in self.model.state_dict().items()})
            yield


@pytest.mark.parametrize("kind", [ModelEma, ModelEmaV2, ModelEmaV3])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_averages_of_state_dictionaries_that_are_made_before_follow_the_masters(level: str, kind: Any) -> None:
    run = Plain(lambda model: kind(model, DECAY), level)
    for _ in run.steps():
        run.ema.update(run.model)
        run.expected.update(run.reference)
    assert_bitwise(run.ema.state(), run.expected.state())
    assert {value.dtype for value in run.ema.state().values() if value.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_average_of_parameters_that_is_given_the_masters_follows_them(level: str, made: str, foreach: bool) -> None:
    run = Plain(lambda model: EMAModel(model.parameters(), DECAY, foreach), level)
    if made == "after":
        run.ema = EMAModel(amp.master_params(run.optimizer), DECAY, foreach)
    for _ in run.steps():
        run.ema.step(amp.master_params(run.optimizer))
        run.expected.step(run.reference.parameters())
    assert_bitwise(run.ema.shadow, run.expected.shadow)
    run.ema.copy_to(run.model.parameters())
    for param, average in zip(run.model.parameters(), run.expected.shadow, strict=True):
        assert_bitwise(param.detach(), average.to(param.dtype))


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("level", LOW_LEVELS)
def test_torchs_average_that_is_made_before_meets_half_weights_and_ours_in_its_place_the_exact_ones(
    level: str, average: str
) -> None:
    """docs/training_loop.md says what torch's does, and what to write."""
    plain, rounded, model = CNN.model(), CNN.model(), CNN.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = AVERAGES[average]()
    made_before, expected, of_rounded = (AveragedModel(one, **arguments) for one in (model, plain, rounded))
    ours = amp.averaged_model(model, optimizer, **arguments)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    message = ""
    for index in range(2):
        train(CNN, model, optimizer, "c", first=index)
        plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        ours.update_parameters(model)
        expected.update_parameters(plain)
        with torch.no_grad():
            for copied, param in zip(rounded.parameters(), model.parameters(), strict=True):
                copied.copy_(param)
        of_rounded.update_parameters(rounded)
        try:
            made_before.update_parameters(model)
        except RuntimeError as error:
            message = str(error)
    assert_bitwise(state(ours), state(expected))
    if average != "equal weights":  # which torch's versions take for bfloat16, or do not
        assert ("dtype" in message) is (average != "exponential, one by one")
    if not message:
        for silent, wanted in zip(made_before.parameters(), of_rounded.parameters(), strict=True):
            torch.testing.assert_close(silent, wanted, rtol=0, atol=1e-6)
    after = amp.averaged_model(model, optimizer, **arguments)
    after.load_state_dict(made_before.state_dict())
    assert_bitwise(state(after), state(made_before))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_averaged_model_made_with_warnings_as_errors_changes_nothing(level: str) -> None:
    model, optimizer = started(level)
    before = state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="moving average"):
            AveragedModel(model)
    assert_bitwise(state(model), before)
    train(NORMED_MLP, model, optimizer, "c")


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
