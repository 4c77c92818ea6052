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
from tests.models import MLP
from tests.support import backward, left_alone, scaler_numbers, train

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


def test_function_casts_at_another_level_are_told_both_levels_that_have_them() -> None:
    model, optimizer = pair()
    with pytest.raises(RuntimeError, match="opt_level='O1'.*opt_level='O4'"):
        amp.initialize(model, optimizer, opt_level="O5", patch_torch_functions=True, verbosity=0)


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
    text = str(caught.value)
    assert text.startswith(f"Unexpected optimization level {level}. Options are 'O0', 'O1', 'O2', 'O3'")
    assert "Note that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero." in text


@pytest.mark.parametrize("level", ["02", "O2 ", "o1", 2])
def test_an_unknown_level_is_told_what_to_type(level: Any) -> None:
    model, optimizer = pair()
    with pytest.raises(RuntimeError) as caught:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    _, _, advice = str(caught.value).partition("not the number zero.")
    assert re.search("opt_level=[\"']O[0-5][\"']", advice)


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


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, "nan", "-inf"])
def test_a_loss_scale_that_cannot_scale_is_refused_by_name_and_value(level: str, value: Any) -> None:
    model, optimizer = pair()
    with left_alone(model, optimizer), pytest.raises((ValueError, RuntimeError)) as caught:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=value, verbosity=0)
    text = str(caught.value)
    assert "loss_scale" in text
    assert str(value) in text
    assert "dynamic" in text


@pytest.mark.parametrize(
    "keywords",
    [
        {"min_loss_scale": 2.0**20, "max_loss_scale": 2.0**10},
        {"min_loss_scale": float("nan")},
        {"max_loss_scale": float("nan")},
        {"min_loss_scale": -1.0},
        {"max_loss_scale": 0.0},
    ],
    ids=str,
)
def test_bounds_of_the_scale_that_leave_no_scale_are_refused_by_name(
    keywords: dict[str, float],
) -> None:
    model, optimizer = pair()
    with left_alone(model, optimizer), pytest.raises((ValueError, RuntimeError)) as caught:
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **keywords)
    for name, value in keywords.items():
        assert name in str(caught.value)
        assert str(value) in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "two"])
def test_the_number_of_losses_is_a_positive_integer(value: Any) -> None:
    model, optimizer = pair()
    with (
        left_alone(model, optimizer),
        pytest.raises((ValueError, TypeError, RuntimeError)) as caught,
    ):
        amp.initialize(model, optimizer, opt_level="O2", num_losses=value, verbosity=0)
    assert "num_losses" in str(caught.value)
    assert str(value) in str(caught.value)


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


def test_a_tuple_of_optimizers_is_named_and_told_what_to_type() -> None:
    model, optimizer = pair()
    with pytest.raises(TypeError) as caught:
        amp.initialize(model, (optimizer,), opt_level="O2", verbosity=0)
    text = str(caught.value).removeprefix(OPTIMIZERS_TYPE)
    assert "tuple" in text
    assert "list" in text


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


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_model_inside_data_parallel_is_refused(level: str) -> None:
    model, optimizer = pair()
    wrapped = DataParallel(model)
    with left_alone(model, optimizer), pytest.raises(RuntimeError) as caught:
        amp.initialize(wrapped, optimizer, opt_level=level, verbosity=0)
    assert str(caught.value).startswith(wrapped_text(DataParallel))


@pytest.mark.usefixtures("one_process_group")
def test_a_model_inside_distributed_data_parallel_is_refused() -> None:
    model, optimizer = pair()
    wrapped = DistributedDataParallel(model)
    with left_alone(model, optimizer), pytest.raises(RuntimeError) as caught:
        amp.initialize([wrapped], optimizer, opt_level="O2", verbosity=0)
    assert str(caught.value).startswith(wrapped_text(DistributedDataParallel))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_optimizer_is_taken_once(level: str) -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
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
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
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
NAMES = (
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)
DEFAULTS = {
    "O0": (True, "O0", torch.float32, False, None, False, 1.0),
    "O1": (True, "O1", None, True, None, None, "dynamic"),
    "O2": (True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": (True, "O3", torch.float16, False, False, False, 1.0),
}


def announcement(level: str, **overrides: Any) -> str:
    defaults = dict(zip(NAMES, DEFAULTS[level], strict=True))
    final = {**defaults, **overrides}
    lines = [f"Selected optimization level {BRIEFS[level]}", ""]
    lines += ["Defaults for this optimization level are:"]
    lines += [f"{name:22} : {value}" for name, value in defaults.items()]
    lines += ["Processing user overrides (additional kwargs that are not None)..."]
    lines += ["After processing overrides, optimization options are:"]
    lines += [f"{name:22} : {value}" for name, value in final.items()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("level", BRIEFS)
def test_initialize_prints_the_level_and_its_properties(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(*pair(), opt_level=level)
    assert capsys.readouterr().out == announcement(level)


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
    amp.initialize(*pair(), opt_level=level, **keywords)
    assert capsys.readouterr().out == announcement(level, **{**keywords, **shown})


@pytest.mark.parametrize(("level", "dtype"), [("O4", "bfloat16"), ("O5", "bfloat16")])
def test_the_bfloat16_levels_announce_themselves_in_the_same_form(
    level: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    amp.initialize(*pair(), opt_level=level)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Selected optimization level {level}:  ")
    assert re.search("bf16|bfloat16", lines[0], re.IGNORECASE)
    assert [line[:25] for line in lines[3:10]] == [f"{name:22} : " for name in NAMES]
    assert "loss_scale             : 1.0" in lines


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_verbosity_0_is_silent_through_an_overflow_too(level: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(MLP, model, optimizer, "coc")
    assert capfd.readouterr() == ("", "")


# --- scale_loss and step --------------------------------------------------------------------------


def test_scale_loss_before_initialize_says_so() -> None:
    model, optimizer = pair()
    loss = MLP.loss(model, MLP.batch())
    with pytest.raises(RuntimeError) as caught, amp.scale_loss(loss, optimizer):
        pass
    assert str(caught.value).startswith(UNINITIALISED)


def test_scale_loss_after_close_says_so_again() -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, verbosity=0)
    amp.close()
    loss = MLP.loss(model, MLP.batch())
    with pytest.raises(RuntimeError) as caught, amp.scale_loss(loss, optimizer):
        pass
    assert str(caught.value).startswith(UNINITIALISED)


def test_a_loss_id_that_no_scaler_has_is_an_index_error_that_names_it() -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)
    loss = MLP.loss(model, MLP.batch())
    with pytest.raises(IndexError) as caught, amp.scale_loss(loss, optimizer, loss_id=2):
        pass
    assert "2" in str(caught.value)
    assert "num_losses" in str(caught.value)


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


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_a_closure_runs_where_there_is_nothing_to_scale(level: str) -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = [param.detach().clone() for param in model.parameters()]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = MLP.loss(model, MLP.batch())
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), torch.Tensor)
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_closure_is_refused_while_a_skip_is_pending() -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    backward(MLP.loss(model, MLP.batch()), optimizer, overflow=True)
    with pytest.raises(RuntimeError, match=starts_with(CLOSURE)):
        optimizer.step(lambda: None)


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


@pytest.mark.parametrize("name", ["acos_", "cosh_", "exp_", "expm1_", "log_", "rsqrt_", "tan_"])
def test_an_in_place_function_on_half_is_refused(name: str) -> None:
    amp.initialize(*pair(), opt_level="O1", verbosity=0)
    half = torch.full((3,), 0.5, dtype=torch.float16)
    text = f"Cannot call in-place function {name} with fp16 arguments."
    with pytest.raises((NotImplementedError, RuntimeError), match=starts_with(text)):
        getattr(torch, name)(half)
    assert torch.equal(half, torch.full((3,), 0.5, dtype=torch.float16))


@pytest.mark.parametrize(("name", "arguments"), [("exp_", ()), ("erfinv_", ()), ("pow_", (2,)), ("cumsum_", (0,))])
def test_an_in_place_method_on_half_is_refused(name: str, arguments: tuple[int, ...]) -> None:
    amp.initialize(*pair(), opt_level="O1", verbosity=0)
    half = torch.full((3,), 0.5, dtype=torch.float16)
    text = f"Cannot call in-place method {name} on fp16 Tensors."
    with pytest.raises((NotImplementedError, RuntimeError), match=starts_with(text)):
        getattr(half, name)(*arguments)
    assert torch.equal(half, torch.full((3,), 0.5, dtype=torch.float16))


BCE = "\namp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` "


@pytest.mark.parametrize("kind", ["function", "module"])
def test_binary_cross_entropy_on_half_is_refused_with_the_cure(kind: str) -> None:
    amp.initialize(*pair(), opt_level="O1", verbosity=0)
    loss = F.binary_cross_entropy if kind == "function" else nn.BCELoss()
    with pytest.raises(NotImplementedError) as caught:
        loss(torch.full((3,), 0.5, dtype=torch.float16), torch.ones(3))
    text = str(caught.value)
    assert text.startswith(BCE)
    assert "BCEWithLogitsLoss" in text
    assert "amp.register_float_function(torch, 'sigmoid')" in text
    assert "allow_banned" in text


def test_binary_cross_entropy_on_float_is_welcome() -> None:
    amp.initialize(*pair(), opt_level="O1", verbosity=0)
    assert F.binary_cross_entropy(torch.full((3,), 0.5), torch.ones(3)).item() == pytest.approx(0.6931, abs=1e-3)


def test_allow_banned_runs_binary_cross_entropy_in_float() -> None:
    amp.initialize(*pair(), opt_level="O1", verbosity=0, allow_banned=True)
    loss = F.binary_cross_entropy(torch.full((3,), 0.5, dtype=torch.float16), torch.ones(3))
    assert loss.dtype == torch.float32


def test_binary_cross_entropy_on_bfloat16_runs_in_float() -> None:
    amp.initialize(*pair(), opt_level="O4", verbosity=0)
    loss = F.binary_cross_entropy(torch.full((3,), 0.5, dtype=torch.bfloat16), torch.ones(3))
    assert loss.dtype == torch.float32


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
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
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


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_a_model_checkpoint_of_another_shape_changes_no_parameter_and_no_master(level: str) -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(MLP, model, optimizer, "cc")
    saved = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)).state_dict()
    untouched = [param for name, param in model.named_parameters() if name.startswith("2.")]
    before = [param.detach().clone() for param in untouched]
    masters = [m.detach().clone() for m in amp.master_params(optimizer)][2:]
    with pytest.raises(RuntimeError, match="2.weight"):
        model.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(before, untouched, strict=True))
    now = list(amp.master_params(optimizer))[2:]
    assert all(torch.equal(a, b) for a, b in zip(masters, now, strict=True))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_assigning_a_checkpoint_over_half_weights_is_refused_with_the_reason(level: str) -> None:
    model, optimizer = pair()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    saved = model.state_dict()
    with (
        left_alone(model, optimizer),
        pytest.raises((RuntimeError, ValueError, TypeError)) as caught,
    ):
        model.load_state_dict(saved, assign=True)
    assert "assign" in str(caught.value)
