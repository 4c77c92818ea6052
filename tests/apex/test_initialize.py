"""`amp.initialize`: its signature, the table of properties, what it returns and what each level leaves behind."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import amp_engine
from amp_engine import amp
from amp_engine.initialization.arguments import InitializeOptions
from tests.models import CNN, MLP, NORMED_MLP
from tests.support import (
    CAST_LEVELS,
    FUNCTION_LEVELS,
    HALF,
    LEVELS,
    WEIGHT_DTYPE,
    assert_bitwise,
    left_alone,
    masters,
    scaler_numbers,
    started,
    train,
    weights_of,
)

APEX_NAMES = (
    "init",
    "half_function",
    "float_function",
    "promote_function",
    "register_half_function",
    "register_float_function",
    "register_promote_function",
    "scale_loss",
    "disable_casts",
    "initialize",
    "state_dict",
    "load_state_dict",
    "master_params",
    "_amp_state",
)
APEX_SIGNATURE = {
    "models": inspect.Parameter.empty,
    "optimizers": None,
    "enabled": True,
    "opt_level": "O1",
    "cast_model_type": None,
    "patch_torch_functions": None,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    "loss_scale": None,
    "cast_model_outputs": None,
    "num_losses": 1,
    "verbosity": 1,
    "min_loss_scale": None,
    "max_loss_scale": 2.0**24,
}
OURS = {
    "skip_on_overflow": "auto",
    "allow_banned": False,
    "adopt_data_writes": False,
    "gradients": "float32",
    "release_gradients": False,
    "masters_on": None,
    "process_group": None,
    "moment_dtype": None,
    "casts": "everywhere",
    "cast_inputs": True,
    "policy": None,
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# --- names and signatures -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*APEX_NAMES, "close", "current_engine"])
def test_the_module_has_apex_names_and_the_package_exports_the_same_objects(name: str) -> None:
    assert hasattr(amp, name)
    if name in APEX_NAMES and not name.startswith("_"):
        assert getattr(amp_engine, name) is getattr(amp, name)


def test_initialize_has_apex_parameters_in_apex_order_and_ours_by_keyword_only() -> None:
    parameters = inspect.signature(amp.initialize).parameters
    positional = {n: p.default for n, p in parameters.items() if p.kind == p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(APEX_SIGNATURE.items())
    keyword_only = {n: p.default for n, p in parameters.items() if p.kind == p.KEYWORD_ONLY}
    assert keyword_only == OURS
    assert len(parameters) == len(positional) + len(keyword_only)


def test_scale_loss_has_apex_parameters() -> None:
    parameters = inspect.signature(amp.scale_loss).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "loss": inspect.Parameter.empty,
        "optimizers": "reached",
        "loss_id": 0,
        "model": None,
        "delay_unscale": False,
        "delay_overflow_check": False,
    }
    assert list(parameters)[2:] == ["loss_id", "model", "delay_unscale", "delay_overflow_check"]


# --- the table of properties ----------------------------------------------------------------------

NAMES = [
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
]
APEX_LEVELS = ("O0", "O1", "O2", "O3")
TABLE = {
    "O0": (True, "O0", torch.float32, False, None, False, 1.0),
    "O1": (True, "O1", None, True, None, None, "dynamic"),
    "O2": (True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": (True, "O3", torch.float16, False, False, False, 1.0),
    "O4": (True, "O4", None, True, None, None, 1.0),
    "O5": (True, "O5", torch.bfloat16, False, True, True, 1.0),
}


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_has_its_properties_in_print_order(level: str) -> None:
    model, _ = started(level, task=MLP)
    options = amp._amp_state.opt_properties.options
    assert list(options)[: len(NAMES)] == NAMES
    assert tuple(options.values())[: len(NAMES)] == TABLE[level]
    if level in APEX_LEVELS:
        assert len(options) == len(NAMES)
    for name, value in zip(NAMES, TABLE[level], strict=True):
        assert getattr(amp._amp_state.opt_properties, name) == value


@pytest.mark.parametrize(
    ("level", "override", "expected"),
    [
        ("O0", {"master_weights": True}, True),
        ("O3", {"master_weights": True}, True),
        ("O2", {"master_weights": False}, False),
        ("O0", {"loss_scale": "dynamic"}, "dynamic"),
        ("O1", {"loss_scale": 128.0}, 128.0),
        ("O1", {"loss_scale": "128.0"}, 128.0),
        ("O2", {"loss_scale": True}, 1.0),
        ("O1", {"cast_model_type": torch.float32}, torch.float32),
        ("O1", {"cast_model_type": False}, False),
        ("O2", {"cast_model_type": False}, False),
        ("O2", {"keep_batchnorm_fp32": "False"}, False),
        ("O3", {"keep_batchnorm_fp32": "True"}, True),
        ("O2", {"enabled": True}, True),
    ],
)
def test_an_override_is_stored_as_its_value(level: str, override: dict[str, Any], expected: Any) -> None:
    model = NORMED_MLP.model()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0, **override)
    (name,) = override
    assert amp._amp_state.opt_properties.options[name] == expected
    assert type(amp._amp_state.opt_properties.options[name]) is type(expected)


def test_state_before_and_after_initialize() -> None:
    state = amp._amp_state
    assert (state.hard_override, state.allow_incoming_model_not_fp32, state.verbosity) == (
        False,
        False,
        1,
    )
    assert not hasattr(state, "loss_scalers")
    model = MLP.model()
    amp.initialize(model, sgd(model), verbosity=0, num_losses=3, min_loss_scale=2.0, max_loss_scale=2.0**10)
    assert state.verbosity == 0
    assert state.min_loss_scale == 2.0
    assert state.max_loss_scale == 2.0**10
    assert len(state.loss_scalers) == 3
    assert [scaler.loss_scale() for scaler in state.loss_scalers] == [1024.0] * 3
    assert isinstance(state.loss_scalers[0].loss_scale(), float)
    assert state.loss_scalers[0].dynamic
    assert state.handle.is_active()


def test_an_engine_is_current_from_initialize_to_close() -> None:
    assert amp.current_engine() is None
    model = MLP.model()
    amp.initialize(model, sgd(model), verbosity=0)
    assert isinstance(amp.current_engine(), amp_engine.Engine)
    amp.close()
    assert amp.current_engine() is None
    amp.close()


# --- what is returned -----------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_return_value_has_the_shape_of_the_arguments(level: str, enabled: bool) -> None:
    keywords: dict[str, Any] = {"opt_level": level, "verbosity": 0, "enabled": enabled}
    model, other = MLP.model(0), MLP.model(1)
    optimizer, other_optimizer = sgd(model), sgd(other)

    result = amp.initialize(model, **keywords)
    assert result is model
    amp.close()

    models = [model, other]
    result = amp.initialize(models, **keywords)
    assert isinstance(result, list)
    assert all(got is given for got, given in zip(result, models, strict=True))
    amp.close()

    result = amp.initialize(model, [], **keywords)
    assert result[0] is model
    assert result[1] == []
    amp.close()

    result = amp.initialize([model], optimizer, **keywords)
    assert result[0] == [model]
    assert result[1] is optimizer
    amp.close()

    optimizers = [optimizer, other_optimizer]
    result = amp.initialize(models, optimizers, **keywords)
    assert result[0] == models
    assert result[1] is optimizers
    assert result[1][0] is optimizer
    assert result[1][1] is other_optimizer


@pytest.mark.parametrize("optimizers", [None, []])
@pytest.mark.parametrize("level", LEVELS)
def test_inference_needs_no_optimizer(level: str, optimizers: Any) -> None:
    model = MLP.model()
    truth = model(MLP.batch()[0])
    amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    with torch.no_grad():
        outputs = model.eval()(MLP.batch()[0])
    torch.testing.assert_close(outputs.float(), truth, rtol=0.05, atol=0.05)


def test_disabled_touches_nothing_and_yields_the_loss_itself(capsys: pytest.CaptureFixture[str]) -> None:
    model = MLP.model()
    optimizer = sgd(model)
    with left_alone(model, optimizer):
        amp.initialize(model, optimizer, opt_level="O2", enabled=False)
    assert capsys.readouterr().out == ""
    loss = MLP.loss(model, MLP.batch())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    optimizer.step()
    assert amp.state_dict() == {}
    with amp.disable_casts():
        pass
    assert list(amp.master_params(optimizer)) == list(model.parameters())


# --- what each level leaves behind ----------------------------------------------------------------


class Zoo(nn.Module):
    """One of each kind of layer whose type the levels treat apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.plain_norm = nn.BatchNorm2d(2, affine=False)
        self.layer_norm = nn.LayerNorm(8)
        self.group_norm = nn.GroupNorm(1, 2)
        self.head = nn.Linear(8, 3)
        self.register_buffer("offset", torch.ones(8))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.seen: torch.dtype | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen = images.dtype
        features = self.plain_norm(self.norm(self.conv(images)))
        return self.head(self.layer_norm(self.group_norm(features)) + self.offset)


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_leaves_its_types_behind(level: str) -> None:
    model = Zoo()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    weight = WEIGHT_DTYPE[level]
    norm = weight if level == "O3" else torch.float32
    assert model.conv.weight.dtype == model.conv.bias.dtype == model.head.weight.dtype == weight
    assert model.norm.weight.dtype == model.norm.running_mean.dtype == norm
    assert model.norm.running_var.dtype == norm
    assert model.plain_norm.running_mean.dtype == weight
    assert model.layer_norm.weight.dtype == model.group_norm.weight.dtype == weight
    assert model.offset.dtype == weight
    assert model.counter.dtype == model.norm.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("level", CAST_LEVELS)
@pytest.mark.parametrize("incoming", [torch.float32, torch.float16, torch.float64])
def test_inputs_of_any_floating_type_are_cast_to_the_model_and_outputs_to_float(
    level: str, incoming: torch.dtype
) -> None:
    model = Zoo()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    outputs = model(torch.randn(2, 1, 8, 8).to(incoming))
    assert model.seen == WEIGHT_DTYPE[level]
    assert outputs.dtype == torch.float32


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_function_casts_leave_inputs_and_outputs_to_the_functions(level: str) -> None:
    model = Zoo()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    outputs = model(torch.randn(2, 1, 8, 8))
    assert model.seen == torch.float32
    assert outputs.dtype == HALF[level]


@pytest.mark.parametrize("keep", [True, "True", False, "False"])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_keep_batchnorm_fp32_is_obeyed(level: str, keep: Any) -> None:
    model, _ = started(level, task=CNN, keep_batchnorm_fp32=keep)
    kept = keep in (True, "True")
    expected = torch.float32 if kept else WEIGHT_DTYPE[level]
    assert model.norm.weight.dtype == model.norm.running_var.dtype == expected
    assert model.conv.weight.dtype == WEIGHT_DTYPE[level]
    assert CNN.loss(model, CNN.batch()).isfinite()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_cast_model_type_overrides_the_type_of_the_level(level: str) -> None:
    model, _ = started(level, task=MLP, cast_model_type=torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert model(MLP.batch()[0]).dtype == torch.float32


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_cast_model_type_false_leaves_the_model_and_keeps_the_rest(level: str) -> None:
    model = NORMED_MLP.model()
    optimizer = sgd(model)
    params = list(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, cast_model_type=False, loss_scale="dynamic", verbosity=0)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert all(a is b for a, b in zip(weights_of(optimizer), params, strict=True))
    assert model(MLP.batch()[0].double().float()).dtype == torch.float32
    losses = train(NORMED_MLP, model, optimizer, "c" * 6 + "o" + "c" * 6)
    assert losses[-1] < losses[0]
    assert scaler_numbers() == (32768.0, 6)


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        ("O0", torch.float16),
        ("O1", torch.float32),
        ("O1", torch.bfloat16),
        ("O2", torch.float16),
        ("O2", torch.bfloat16),
        ("O3", torch.bfloat16),
        ("O4", torch.float32),
        ("O5", torch.bfloat16),
    ],
)
def test_cast_model_outputs_is_the_type_of_the_outputs(level: str, wanted: torch.dtype) -> None:
    model, _ = started(level, task=MLP, cast_model_outputs=wanted)
    assert model(MLP.batch()[0]).dtype == wanted


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_are_the_same_objects_and_in_the_same_order(level: str) -> None:
    model = NORMED_MLP.model()
    names = {name: id(param) for name, param in model.named_parameters()}
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    assert {name: id(param) for name, param in model.named_parameters()} == names


# --- masters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_are_there_at_once_and_are_the_values_before_the_cast(level: str) -> None:
    model = NORMED_MLP.model()
    exact = [param.detach().clone() for param in model.parameters()]
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert_bitwise(masters(optimizer), exact)
    assert {master.dtype for master in weights_of(optimizer)} == {torch.float32}
    assert all(master.requires_grad and master.is_leaf for master in weights_of(optimizer))
    norm = model[1]
    assert any(param is norm.weight for param in weights_of(optimizer))
    assert not any(param is model[0].weight for param in weights_of(optimizer))


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_without_masters_the_groups_hold_the_parameters_of_the_model(level: str) -> None:
    model, optimizer = started(level, task=MLP)
    assert all(a is b for a, b in zip(amp.master_params(optimizer), model.parameters(), strict=True))


def test_master_params_is_lazy_and_takes_any_optimizer() -> None:
    model = MLP.model()
    optimizer = sgd(model)
    iterator = amp.master_params(optimizer)
    assert iter(iterator) is iterator
    assert next(iterator) is model[0].weight


def test_the_stash_that_scripts_read_shows_the_real_parameters() -> None:
    model, optimizer = started("O2")
    stash = optimizer._amp_stash
    halves = [param for param in model.parameters() if param.dtype == torch.float16]
    assert all(a is b for a, b in zip(stash.all_fp16_params, halves, strict=True))
    assert_bitwise(
        [half.float() for half in halves],
        [master.half().float() for master in stash.all_fp32_from_fp16_params],
    )
    (singles,) = stash.fp32_from_fp32_groups
    assert all(a is b for a, b in zip(singles, [model[1].weight, model[1].bias], strict=True))
    assert [len(group) for group in stash.fp16_groups] == [3]
    assert [len(group) for group in stash.fp32_from_fp16_groups] == [3]
    assert [len(group) for group in stash.fp32_from_fp32_groups] == [2]
    assert stash.lazy_init_called is True
    assert stash.params_have_scaled_gradients is False


# --- scripts as people wrote them -----------------------------------------------------------------


def test_a_second_initialize_brings_new_scalers() -> None:
    first, second = MLP.model(0), MLP.model(1)
    first_optimizer = sgd(first)
    amp.initialize(first, first_optimizer, opt_level="O2", verbosity=0)
    train(MLP, first, first_optimizer, "co")
    assert scaler_numbers() == (32768.0, 0)
    amp.initialize(second, sgd(second), opt_level="O2", num_losses=2, verbosity=0)
    assert amp.state_dict(format="apex") == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 65536.0, "unskipped": 0},
    }


def test_the_loss_id_may_be_positional() -> None:
    model, optimizer = started("O2", task=MLP, num_losses=2)
    with amp.scale_loss(MLP.loss(model, MLP.batch()), optimizer, 1) as scaled_loss:
        scaled_loss.backward()
    assert scaler_numbers(0) == (65536.0, 0)
    assert scaler_numbers(1) == (65536.0, 1)


def test_all_of_initialize_may_be_positional() -> None:
    model = MLP.model()
    amp.initialize(model, sgd(model), True, "O2", None, None, True, True, 128.0, None, 2, 0, 1.0, 2.0**10)
    assert amp._amp_state.opt_properties.loss_scale == 128.0
    assert len(amp._amp_state.loss_scalers) == 2


@pytest.mark.parametrize("level", CAST_LEVELS)
@pytest.mark.parametrize("incoming", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_any_floating_type_is_welcome(level: str, incoming: torch.dtype) -> None:
    model = MLP.model().to(incoming)
    exact = [param.detach().float() for param in model.parameters()]
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert {param.dtype for param in model.parameters()} == {WEIGHT_DTYPE[level]}
    if level in ("O2", "O5"):
        assert_bitwise(masters(optimizer), exact)
    losses = train(MLP, model, optimizer, "c" * 12)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(("level", "incoming"), [("O1", torch.float16), ("O4", torch.bfloat16)])
def test_a_half_model_under_function_casts_runs_and_trains(level: str, incoming: torch.dtype) -> None:
    model = MLP.model().to(incoming)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, master_weights=True, verbosity=0)
    losses = train(MLP, model, optimizer, "c" * 12)
    assert losses[-1] < losses[0]


def test_a_model_with_no_floating_parameter_of_its_own_is_welcome() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Identity())
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model(torch.randn(2, 3)).dtype == torch.float32


def test_type_checkers_are_told_of_every_option():
    parameters = list(inspect.signature(amp.initialize).parameters)
    assert parameters[:4] == ["models", "optimizers", "enabled", "opt_level"]
    assert parameters[4:] == list(InitializeOptions.__annotations__)
    assert amp.initialize.__module__ == "amp_engine.amp"
    assert "opt_level" in amp.initialize.__doc__
