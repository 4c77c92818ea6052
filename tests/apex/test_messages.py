"""Every text that scripts and log parsers know from apex, provoked and compared letter by letter.

Where the engine has more levels or more to say than apex had, apex's words come first and the rest is free.
Errors leave model and optimizer bitwise as they were.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from amp_engine import amp
from amp_engine.kernels import missing
from tests.apex.test_initialize import NAMES, TABLE
from tests.models import MLP
from tests.support import backward, left_alone, scaler_numbers, started, train

UNINITIALISED = (
    "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  "
    "model, optimizer = amp.initialize(model, optimizer, opt_level=...) must be called before "
    "`with amp.scale_loss`."
)
CLOSURE = "Currently, Amp does not support closure use with optimizers."
TWICE = "A given optimizer should only be passed through amp.initialize once."
OPTIMIZERS_TYPE = "optimizers must be either a single optimizer or a list of optimizers."
MODELS_TYPE = "models must be either a single model or a list of models."
OVERFLOW = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}"


def pair(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = MLP.model(seed)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def starts_with(text: str) -> str:
    return "^" + re.escape(text)


# --- initialize: properties -----------------------------------------------------------------------

O1_CAST = (
    "O1 inserts casts around Torch functions rather than model weights, so with O1, the model "
    "weights themselves should remain FP32. If you wish to cast the model to a different type, "
    "use opt_level='O2' or 'O3'. cast_model_type was torch.float16"
)
PATCH_ELSEWHERE = "Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'."
O1_BATCHNORM = (
    "With opt_level O1, batchnorm functions are automatically patched to run in FP32, so "
    "keep_batchnorm_fp32 should be None. keep_batchnorm_fp32 was {}"
)
O1_MASTERS = (
    "It doesn't make sense to use master_weights with O1. With O1, your model weights themselves should be FP32."
)
PROPERTY_ERRORS = [
    ("O1", {"cast_model_type": torch.float16}, O1_CAST),
    ("O0", {"patch_torch_functions": True}, PATCH_ELSEWHERE),
    ("O2", {"patch_torch_functions": True}, PATCH_ELSEWHERE),
    ("O3", {"patch_torch_functions": True}, PATCH_ELSEWHERE),
    ("O1", {"keep_batchnorm_fp32": True}, O1_BATCHNORM.format(True)),
    ("O1", {"keep_batchnorm_fp32": False}, O1_BATCHNORM.format(False)),
    ("O1", {"master_weights": False}, O1_MASTERS),
]


@pytest.mark.parametrize(("level", "keywords", "text"), PROPERTY_ERRORS)
def test_a_property_that_does_not_fit_the_level_is_refused(level: str, keywords: dict[str, Any], text: str) -> None:
    model, optimizer = pair()
    with left_alone(model, optimizer), pytest.raises(RuntimeError, match=starts_with(text)):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)


@pytest.mark.parametrize(("level", "keywords", "text"), PROPERTY_ERRORS)
def test_hard_override_prints_the_error_as_a_warning(
    level: str, keywords: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = pair()
    amp._amp_state.hard_override = True
    amp.initialize(model, optimizer, opt_level=level, **keywords)
    assert f"Warning:  {text}" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["true", "yes", "", 1.5, object()], ids=["true", "yes", "empty", "1.5", "object"])
def test_keep_batchnorm_fp32_is_a_boolean_or_its_name(value: Any) -> None:
    model, optimizer = pair()
    text = "^keep_batchnorm_fp32 must be a boolean,"
    with left_alone(model, optimizer), pytest.raises(AssertionError, match=text):
        amp.initialize(model, optimizer, opt_level="O2", keep_batchnorm_fp32=value, verbosity=0)


@pytest.mark.parametrize("level", ["02", "O2 ", "o2", "O6", "", 2, None, True, ["O2"]])
def test_an_unknown_level_is_named_with_the_levels_that_exist(level: Any) -> None:
    model, optimizer = pair()
    with left_alone(model, optimizer), pytest.raises(RuntimeError) as caught:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    text, note, advice = str(caught.value).partition("the prefix O is the letter O, not the number zero.")
    assert text.startswith(f"Unexpected optimization level {level}. Options are 'O0', 'O1', 'O2', 'O3'")
    assert text.endswith("Note that in `O0`, `O1`, etc., ")
    assert note
    if level in ("02", "O2 ", "o2", 2):
        assert re.search("opt_level=[\"']O2[\"']", advice)


def test_the_switch_of_cudnn_is_required_as_in_apex() -> None:
    model, optimizer = pair()
    with (
        torch.backends.cudnn.flags(enabled=False),
        left_alone(model, optimizer),
        pytest.raises(RuntimeError, match="^Amp requires torch.backends.cudnn.enabled = True"),
    ):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


@pytest.mark.parametrize("value", ["abc", "", "1e"])
def test_a_loss_scale_that_is_no_number_is_a_plain_value_error(value: str) -> None:
    model, optimizer = pair()
    with (
        left_alone(model, optimizer),
        pytest.raises(ValueError, match="could not convert|loss_scale"),
    ):
        amp.initialize(model, optimizer, opt_level="O2", loss_scale=value, verbosity=0)


NUMBERS = [
    *({"loss_scale": value} for value in (float("nan"), float("inf"), -1.0, 0.0, "nan", "-inf")),
    {"min_loss_scale": 2.0**20, "max_loss_scale": 2.0**10},
    {"min_loss_scale": float("nan")},
    {"max_loss_scale": float("nan")},
    {"min_loss_scale": -1.0},
    {"max_loss_scale": 0.0},
    *({"num_losses": value} for value in (0, -1, 1.5, "two")),
]


@pytest.mark.parametrize("keywords", NUMBERS, ids=str)
def test_a_number_that_means_nothing_is_refused_by_name_and_value(keywords: dict[str, Any]) -> None:
    model, optimizer = pair()
    with left_alone(model, optimizer), pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **keywords)
    for name, value in keywords.items():
        assert name in str(caught.value)
        assert str(value) in str(caught.value)
    assert ("dynamic" in str(caught.value)) is ("loss_scale" in keywords)


# --- initialize: models and optimizers ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tuple", "dict", "string", "class", "generator", "module"])
def test_optimizers_of_another_shape_are_refused(kind: str) -> None:
    model, optimizer = pair()
    foreign = {
        "tuple": (optimizer,),
        "dict": {"opt": optimizer},
        "string": "sgd",
        "class": torch.optim.SGD,
        "generator": (opt for opt in [optimizer]),
        "module": model,
    }[kind]
    with left_alone(model, optimizer), pytest.raises(TypeError) as caught:
        amp.initialize(model, foreign, opt_level="O2", verbosity=0)
    assert str(caught.value).startswith(OPTIMIZERS_TYPE)
    if kind == "tuple":
        assert re.search("tuple.*list", str(caught.value).removeprefix(OPTIMIZERS_TYPE), re.DOTALL)


@pytest.mark.parametrize("kind", ["tuple", "dict", "string", "class", "function", "none"])
def test_models_of_another_shape_are_refused(kind: str) -> None:
    model, optimizer = pair()
    foreign = {
        "tuple": (model,),
        "dict": {"net": model},
        "string": "net",
        "class": nn.Linear,
        "function": lambda x: x,
        "none": None,
    }[kind]
    with left_alone(model, optimizer), pytest.raises(TypeError) as caught:
        amp.initialize(foreign, optimizer, opt_level="O2", verbosity=0)
    assert str(caught.value).startswith(MODELS_TYPE)


@pytest.mark.parametrize("place", ["models", "optimizers"])
def test_a_foreign_object_in_a_list_is_named(place: str) -> None:
    model, optimizer = pair()
    models = [model, "not a model"] if place == "models" else [model]
    optimizers = [optimizer, object()] if place == "optimizers" else [optimizer]
    with left_alone(model, optimizer), pytest.raises(TypeError) as caught:
        amp.initialize(models, optimizers, opt_level="O2", verbosity=0)
    text = str(caught.value)
    assert place in text
    assert ("str" if place == "models" else "object") in text


class FP16_Optimizer:  # noqa: N801
    """Named like apex's own wrapper, fp16_utils.FP16_Optimizer."""


@pytest.mark.parametrize("in_a_list", [False, True])
def test_an_optimizer_that_holds_masters_of_its_own_is_refused(in_a_list: bool) -> None:
    model, optimizer = pair()
    wrapper = FP16_Optimizer()
    with left_alone(model, optimizer), pytest.raises(RuntimeError) as caught:
        amp.initialize(model, [optimizer, wrapper] if in_a_list else wrapper, opt_level="O2", verbosity=0)
    assert str(caught.value) == (
        f"An incoming optimizer is an instance of {FP16_Optimizer}. The optimizer(s) passed to amp.initialize() must "
        "be bare \ninstances of either ordinary Pytorch optimizers, or Apex fused \noptimizers.\n"
    )


def wrapped_text(wrapper: type) -> str:
    return (
        f"Incoming model is an instance of {wrapper}. Parallel wrappers should only be applied to "
        "the model(s) AFTER \nthe model(s) have been returned from amp.initialize."
    )


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(
    ("level", "wrapper"), [("O0", DataParallel), ("O2", DataParallel), ("O2", DistributedDataParallel)]
)
def test_a_model_in_a_parallel_wrapper_is_refused(level: str, wrapper: Any) -> None:
    model, optimizer = pair()
    wrapped = wrapper(model)
    for models in (wrapped, [wrapped]):
        with left_alone(model, optimizer), pytest.raises(RuntimeError) as caught:
            amp.initialize(models, optimizer, opt_level=level, verbosity=0)
        assert str(caught.value).startswith(wrapped_text(wrapper))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_optimizer_is_taken_once(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    with left_alone(model, optimizer), pytest.raises(RuntimeError, match=starts_with(TWICE)):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def test_an_optimizer_that_stands_twice_in_the_list_is_refused() -> None:
    model, optimizer = pair()
    with left_alone(model, optimizer), pytest.raises(RuntimeError, match=starts_with(TWICE)):
        amp.initialize(model, [optimizer, optimizer], opt_level="O2", verbosity=0)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_an_uninitialised_lazy_module_is_named_and_told_what_to_do(level: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with (
        left_alone(model, optimizer),
        pytest.raises((RuntimeError, ValueError, TypeError)) as caught,
    ):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    text = str(caught.value)
    assert "1.weight" in text or "LazyLinear" in text
    assert "forward" in text or "batch" in text or "run" in text


def test_a_refused_call_leaves_the_running_engine_at_work() -> None:
    model, optimizer = started("O2", task=MLP)
    train(MLP, model, optimizer, "cc")
    other, other_optimizer = pair(1)
    for keywords in ({"opt_level": "O7"}, {"loss_scale": float("nan")}, {"num_losses": 0}):
        with pytest.raises((RuntimeError, ValueError)):
            amp.initialize(other, other_optimizer, verbosity=0, **keywords)
    before = [master.detach().clone() for master in amp.master_params(optimizer)]
    train(MLP, model, optimizer, "c", first=2)
    assert scaler_numbers() == (65536.0, 3)
    assert not any(torch.equal(old, new) for old, new in zip(before, amp.master_params(optimizer), strict=True))


# --- initialize: what it prints -------------------------------------------------------------------

BRIEFS = {
    "O0": "O0:  Pure FP32 training.",
    "O1": "O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
    "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
    "O3": "O3:  Pure FP16 training.",
}


def announcement(level: str, **overrides: Any) -> str:
    defaults = dict(zip(NAMES, TABLE[level], strict=True))
    final = {**defaults, **overrides}
    lines = [f"Selected optimization level {BRIEFS[level]}", ""]
    lines += ["Defaults for this optimization level are:"]
    lines += [f"{name:22} : {value}" for name, value in defaults.items()]
    lines += ["Processing user overrides (additional kwargs that are not None)..."]
    lines += ["After processing overrides, optimization options are:"]
    lines += [f"{name:22} : {value}" for name, value in final.items()]
    return "\n".join(lines) + "\n"


BY = "by the compiled kernels." if missing(torch.device("cpu")) is None else "by its own class."
STEPS = {
    "O1": f"SGD steps {BY}",
    "O2": f"SGD steps 4 FP32 masters {BY}  Weights and state take 10 bytes a parameter.",
}


@pytest.mark.parametrize("level", BRIEFS)
def test_verbosity_2_prints_the_level_and_its_properties(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(*pair(), opt_level=level, verbosity=2)
    steps = f"{STEPS[level]}\n" if level in STEPS else ""
    assert capsys.readouterr().out.startswith(announcement(level) + steps)


@pytest.mark.parametrize("level", BRIEFS)
def test_initialize_prints_the_level_its_overrides_and_what_steps_what(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    amp.initialize(*pair(), opt_level=level, loss_scale=128.0)
    assert capsys.readouterr().out.splitlines()[:3] == [
        f"Selected optimization level {BRIEFS[level]}",
        "Overrides:  loss_scale=128.0",
        STEPS.get(level, f"SGD steps {BY}"),
    ]


@pytest.mark.parametrize(
    ("level", "keywords", "shown"),
    [
        ("O0", {"master_weights": True}, {}),
        ("O0", {"loss_scale": "dynamic"}, {}),
        ("O1", {"loss_scale": "128.0"}, {"loss_scale": 128.0}),
        ("O1", {"loss_scale": 128}, {"loss_scale": 128.0}),
        ("O2", {"keep_batchnorm_fp32": "False"}, {"keep_batchnorm_fp32": False}),
        ("O2", {"loss_scale": 1.0, "master_weights": False}, {}),
        ("O2", {"cast_model_type": torch.bfloat16}, {}),
        ("O3", {"keep_batchnorm_fp32": True, "loss_scale": "dynamic"}, {}),
    ],
)
def test_initialize_prints_what_the_overrides_made_of_it(
    level: str,
    keywords: dict[str, Any],
    shown: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    amp.initialize(*pair(), opt_level=level, verbosity=2, **keywords)
    assert capsys.readouterr().out.startswith(announcement(level, **{**keywords, **shown}))


@pytest.mark.parametrize(("level", "dtype"), [("O4", "bfloat16"), ("O5", "bfloat16")])
def test_the_bfloat16_levels_announce_themselves_in_the_same_form(
    level: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    amp.initialize(*pair(), opt_level=level, verbosity=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Selected optimization level {level}:  ")
    assert re.search("bf16|bfloat16", lines[0], re.IGNORECASE)
    assert [line[:25] for line in lines[3:10]] == [f"{name:22} : " for name in NAMES]
    assert "loss_scale             : 1.0" in lines


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_verbosity_0_is_silent_through_an_overflow_too(level: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started(level, task=MLP)
    train(MLP, model, optimizer, "coc")
    assert capfd.readouterr() == ("", "")


# --- scale_loss and step --------------------------------------------------------------------------


def test_scale_loss_before_initialize_and_after_close_says_so() -> None:
    model, optimizer = pair()
    for _ in range(2):
        loss = MLP.loss(model, MLP.batch())
        with pytest.raises(RuntimeError, match=starts_with(UNINITIALISED)), amp.scale_loss(loss, optimizer):
            pass
        amp.initialize(model, optimizer, verbosity=0)
        amp.close()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_prints_apexs_line_per_skipped_step_and_one_of_its_cause(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level=level)
    capsys.readouterr()
    train(MLP, model, optimizer, "coooc")
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == [OVERFLOW.format(0, scale) for scale in (32768.0, 16384.0, 8192.0)]
    said = [line.split("  ")[:2] for line in lines[1::2]]
    assert said == [["Amp post-mortem:", "backward."]] * 2, "what the check knows, and the parameter once"
    assert lines[0] == ("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0")


def test_the_overflow_line_names_the_scaler_of_the_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level="O2", num_losses=3)
    capsys.readouterr()
    backward(MLP.loss(model, MLP.batch()), optimizer, loss_id=2, overflow=True)
    optimizer.step()
    assert capsys.readouterr().out.splitlines()[0] == OVERFLOW.format(2, 32768.0)


@pytest.mark.parametrize(
    ("level", "keywords"),
    [
        ("O1", {}),
        ("O2", {}),
        ("O5", {"loss_scale": 128.0}),
        ("O0", {"loss_scale": 128.0}),
        ("O3", {"loss_scale": "dynamic"}),
    ],
)
def test_a_closure_is_refused_and_nothing_moves(level: str, keywords: dict[str, Any]) -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)
    called = []
    with left_alone(model, optimizer), pytest.raises(RuntimeError, match=starts_with(CLOSURE)):
        optimizer.step(lambda: called.append(1))
    with left_alone(model, optimizer), pytest.raises(RuntimeError, match=starts_with(CLOSURE)):
        optimizer.step(closure=lambda: called.append(1))
    assert called == []


def test_a_static_scale_that_is_not_skipped_reports_its_overflow_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    capsys.readouterr()
    train(MLP, model, optimizer, "cooo")
    lines = [line for line in capsys.readouterr().out.splitlines() if "Gradient overflow" in line]
    assert len(lines) == 1
    assert "128" in lines[0]
    assert "skip_on_overflow" in lines[0]


# --- O1 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["half", "float", "promote"])
def test_registering_a_name_that_is_not_there_is_refused(kind: str) -> None:
    register = getattr(amp, f"register_{kind}_function")
    with pytest.raises(ValueError, match="No function named") as caught:
        register(F, "no_such_function")
    assert str(caught.value) == f"No function named no_such_function in module {F}."


def test_verbosity_2_prints_each_cast(capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(*pair(), opt_level="O1", verbosity=2)
    capsys.readouterr()
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert "Float->Half (mm)" in capsys.readouterr().out.splitlines()
    torch.exp(torch.ones(2, dtype=torch.float16))
    assert "Half->Float (exp)" in capsys.readouterr().out.splitlines()


# --- checkpoints ----------------------------------------------------------------------------------


def entry(loss_scale: float, unskipped: int) -> dict[str, float | int]:
    return {"loss_scale": loss_scale, "unskipped": unskipped}


def test_more_saved_scalers_than_losses_are_reported_and_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    amp.initialize(*pair(), opt_level="O2", verbosity=1)
    capsys.readouterr()
    amp.load_state_dict({"loss_scaler0": entry(512.0, 3), "loss_scaler1": entry(64.0, 5)})
    assert capsys.readouterr().out == (
        "Warning: state_dict contains 2 entries, while 1 loss_scalers are used\n"
        "Skipping loss_scaler[1], since num_losses was set to 1\n"
    )
    assert amp.state_dict(format="apex") == {"loss_scaler0": entry(512.0, 3)}


def test_fewer_saved_scalers_than_losses_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(*pair(), opt_level="O2", num_losses=2)
    capsys.readouterr()
    amp.load_state_dict({"loss_scaler0": entry(512.0, 3)})
    assert capsys.readouterr().out == ("Warning: state_dict contains 1 entries, while 2 loss_scalers are used\n")
    assert amp.state_dict(format="apex") == {
        "loss_scaler0": entry(512.0, 3),
        "loss_scaler1": entry(65536.0, 0),
    }


def test_an_unexpected_key_is_refused_by_name() -> None:
    amp.initialize(*pair(), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError) as caught:
        amp.load_state_dict({"loss_scaler0": entry(512.0, 3), "optimizer": {}})
    assert str(caught.value).startswith(
        'Error(s) in loading state_dict. Unexpected key(s) in state_dict: "optimizer". '
    )


@pytest.mark.parametrize(
    "saved",
    [
        {"loss_scale": float("nan"), "unskipped": 0},
        {"loss_scale": 0.0, "unskipped": 0},
        {"loss_scale": "many", "unskipped": 0},
        {"loss_scale": 128.0},
        128.0,
    ],
    ids=["nan", "zero", "text", "no unskipped", "number"],
)
def test_a_scaler_entry_of_another_form_is_refused_and_changes_nothing(saved: Any) -> None:
    model, optimizer = started("O2", task=MLP)
    before = amp.state_dict()
    with (
        left_alone(model, optimizer),
        pytest.raises((RuntimeError, ValueError, TypeError, KeyError)) as e,
    ):
        amp.load_state_dict({"loss_scaler0": saved})
    assert "loss_scale" in str(e.value) or "unskipped" in str(e.value)
    assert amp.state_dict() == before


def test_something_that_is_no_state_dict_is_refused_by_name() -> None:
    amp.initialize(*pair(), opt_level="O2", verbosity=0)
    with pytest.raises(TypeError, match="list"):
        amp.load_state_dict([1, 2])


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_assigning_a_checkpoint_over_half_weights_is_refused_with_the_reason(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    saved = model.state_dict()
    with (
        left_alone(model, optimizer),
        pytest.raises((RuntimeError, ValueError, TypeError)) as caught,
    ):
        model.load_state_dict(saved, assign=True)
    assert "assign" in str(caught.value)
