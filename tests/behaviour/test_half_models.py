"""Models that arrive in half, as `from_pretrained` gives them: what each level makes of them."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import AmpStateError, AmpWarning, Engine, amp
from amp_engine.kernels import has_native
from amp_engine.optimizers import FusedAdam
from tests.models import MLP
from tests.support import (
    CAST_LEVELS,
    FUNCTION_LEVELS,
    HALF,
    assert_bitwise,
    backward,
    frozen,
    left_alone,
    train,
    weights_of,
)

HALVES = (torch.float16, torch.bfloat16)
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-4),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-4),  # its own step, at every level
}


class Normed(nn.Module):
    """Linear, LayerNorm, GELU, Linear: takes any floating type, as a language model takes tokens."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.to(dtype)  # after its numbers were drawn, which differ by type in some versions of torch

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.gelu(self.norm(self.first(x.to(self.first.weight.dtype)))))


def adamw(model: nn.Module) -> Optimizer:
    return OPTIMIZERS["AdamW"](model.parameters())


def begun(dtype: torch.dtype, level: str, make: Any = OPTIMIZERS["AdamW"], **keywords: Any) -> tuple[Normed, Optimizer]:
    torch.manual_seed(0)
    model = Normed(dtype)
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **keywords})
    return model, optimizer


def exact(model: nn.Module) -> dict[str, Tensor]:
    """A copy of each value from which the next step goes on."""
    return {name: value.detach().clone() for name, value in amp.named_masters(model)}


# --- refused where weights are FP32 ---------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_half_weights_are_refused_by_name_and_with_what_to_type(level: str, dtype: torch.dtype, make: Any) -> None:
    model = Normed(torch.float32)
    model.norm.to(dtype)
    optimizer = make(model.parameters())
    with left_alone(model, optimizer), pytest.raises(RuntimeError) as caught:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    tensor = {torch.float16: "HalfTensor", torch.bfloat16: "BFloat16Tensor"}[dtype]
    text = str(caught.value)
    assert text.startswith(
        f"Found param norm.weight with type torch.{tensor}, expected torch.FloatTensor.\nWhen using amp.initialize, "
        "you do not need to call .half() on your model\nbefore passing it, no matter what optimization level you "
        "choose."
    )
    assert "norm.weight (and 1 more)" in text
    better = {torch.float16: "O2", torch.bfloat16: "O5"}[dtype]
    assert all(line in text for line in (f"opt_level='{better}'", "master_weights=True", "model.float()"))


def test_half_weights_are_named_with_their_model_or_with_their_place_in_the_groups() -> None:
    models = [MLP.model(), MLP.model().bfloat16()]
    with pytest.raises(AmpStateError, match=r"models\[1\]\.0\.w"):
        amp.initialize(models, [torch.optim.SGD(models[1].parameters(), lr=0.1)], opt_level="O4", verbosity=0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).half())], lr=0.1)
    for level in ("O0", "O1", "O4"):  # a model of O0 is cast; this is in none
        with pytest.raises(RuntimeError, match="Found param 1 of group 0 of SGD with type torch.HalfTensor"):
            amp.initialize(MLP.model(), optimizer, opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_half_models_without_an_optimizer_are_welcome(level: str) -> None:
    model = amp.initialize(Normed(torch.bfloat16), opt_level=level, verbosity=0)
    model(torch.ones(2, 8))
    assert model.first.weight.dtype is torch.bfloat16


def add_a_group(model: nn.Module, optimizer: Optimizer) -> None:
    model.late = nn.Linear(4, 4).bfloat16()
    optimizer.add_param_group({"params": list(model.late.parameters())})


def unfreeze(model: Any, optimizer: Optimizer) -> None:
    model.late.requires_grad_(True)


def cast_all(model: nn.Module, optimizer: Optimizer) -> None:
    model.bfloat16()


def begin_again(model: nn.Module, optimizer: Optimizer) -> None:
    model.late = nn.Linear(4, 4).bfloat16()
    amp.initialize(model, adamw(model.late), opt_level="O4", verbosity=0)


@pytest.mark.parametrize("when", ["the optimizer was passed", "the optimizer is made later"])
@pytest.mark.parametrize(("level", "option"), [("O5", "16-true"), ("O2", "bf16-true")])
def test_a_model_that_a_trainer_converts_to_the_other_half_type_is_told_once(
    level: str, option: str, when: str
) -> None:
    """As Lightning's `precision` does, before it makes optimizers."""
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer if when == "the optimizer was passed" else None, opt_level=level, verbosity=0)
    model.to(torch.float16 if option == "16-true" else torch.bfloat16)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            backward(model(MLP.batch()[0]).float().square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    (one,) = (str(one.message) for one in heard if "converted after amp.initialize" in str(one.message))
    assert f"precision='{option}'" in one


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("arrive", [add_a_group, unfreeze, cast_all, begin_again])
@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_half_weights_that_come_later_are_refused_before_they_are_stepped(level: str, arrive: Any, make: Any) -> None:
    model: Any = Normed(torch.float32)
    if arrive is unfreeze:
        model.late = nn.Linear(4, 4).bfloat16().requires_grad_(False)
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.ones(2, 8)

    def iterate() -> None:
        optimizer.zero_grad()
        y = model(x).float()
        backward((model.late(y.bfloat16()).float() if hasattr(model, "late") else y).square().mean(), optimizer)
        optimizer.step()

    iterate()
    before: dict[str, Tensor] = {}
    with pytest.raises(RuntimeError, match=r"Found param (late|first)\.weight with type torch.BFloat16Tensor"):  # noqa: PT012
        arrive(model, optimizer)
        before = copy.deepcopy(dict(model.named_parameters()))
        iterate()
    for name, value in before.items():
        assert torch.equal(dict(model.named_parameters())[name], value)
    model.float()
    if arrive is not begin_again:
        optimizer.state.clear()
    iterate()  # and goes on where that was mended


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("arrive", [add_a_group, unfreeze])
@pytest.mark.parametrize("level", ["O0", "O4"])
def test_half_weights_that_come_later_are_refused_by_steps_that_torch_takes_itself(
    level: str, arrive: Any, closure: bool
) -> None:
    model: Any = Normed(torch.float32)
    optimizer = adamw(model)
    if arrive is unfreeze:
        model.late = nn.Linear(4, 4).requires_grad_(False)
        optimizer.add_param_group({"params": list(model.late.parameters())})
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if arrive is unfreeze:
        model.late.bfloat16()

    def iterate() -> None:
        optimizer.zero_grad()
        y = model.first.weight.sum() + (model.late.weight.float().sum() if hasattr(model, "late") else 0.0)
        y.backward()
        optimizer.step((lambda: y) if closure else None)

    iterate()
    arrive(model, optimizer)
    before = copy.deepcopy(dict(model.named_parameters()))
    with pytest.raises(AmpStateError, match=r"Found param late\.weight with type torch.BFloat16Tensor"):
        iterate()
    assert_bitwise(dict(model.named_parameters()), before)


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
@pytest.mark.parametrize("switch", ["allow_incoming_model_not_fp32", "hard_override"])
def test_half_weights_are_let_through_where_that_was_asked_for_and_it_is_said_once(level: str, switch: str) -> None:
    setattr(amp._amp_state, switch, True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model, optimizer = begun(torch.bfloat16, level)
        train(MLP, model, optimizer, "cc")
    (warning,) = found
    assert warning.category is AmpWarning
    assert "AdamW steps first.weight (and 5 more) in bfloat16" in str(warning.message)
    assert "leaves most bfloat16 weights where they were" in str(warning.message)
    assert {p.dtype for p in weights_of(optimizer)} == {torch.bfloat16}
    add_a_group(model, optimizer)
    with pytest.warns(AmpWarning, match=r"late\.weight \(and 1 more\)"):
        train(MLP, model, optimizer, "c")


def test_float16_weights_that_are_let_through_are_told_of_their_eps(capsys: pytest.CaptureFixture[str]) -> None:
    model = Normed(torch.float16)
    with Engine() as engine:
        engine.allow_incoming_model_not_fp32 = True
        with pytest.warns(AmpWarning, match="an eps of 1e-8 is 0 in float16"):
            engine.initialize(model, adamw(model), opt_level="O4")
    assert "AdamW steps float16 weights in float16 here, where eps=1e-08 is 0" in capsys.readouterr().out


# --- masters where functions are cast -------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_master_weights_give_half_parameters_masters_and_leave_the_others(
    level: str, dtype: torch.dtype, make: Any
) -> None:
    model = Normed(torch.float32)
    model.first.to(dtype)
    optimizer = make(model.parameters())
    start = [p.detach().float().clone() for p in weights_of(optimizer)]
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, master_weights=True)
    weights = weights_of(optimizer)
    assert [w is p for w, p in zip(weights, model.parameters(), strict=True)] == [False] * 2 + [True] * 4
    assert {w.dtype for w in weights} == {torch.float32}
    train(MLP, model, optimizer, "cccccccc")
    for weight, param, old in zip(weights, model.parameters(), start, strict=True):
        assert (weight != old).float().mean() > 0.9  # also where the half parameter stands still
        assert_bitwise(param.detach(), weight.detach().to(param.dtype))
    x = torch.ones(2, 8)
    kept = model(x)  # from copies of weights that may be older than the last step
    with torch.no_grad():
        assert_bitwise(kept.detach(), model(x))


@pytest.mark.parametrize(
    "into", [("O1", True), ("O4", True), ("O5", None), ("O5", "split"), ("O2", None), ("O0", None)]
)
@pytest.mark.parametrize("out_of", [("O1", True), ("O4", True), ("O5", None)])
def test_checkpoints_of_half_models_are_exact_across_levels(out_of: Any, into: Any) -> None:
    model, optimizer = begun(torch.bfloat16, out_of[0], master_weights=out_of[1])
    train(MLP, model, optimizer, "ccc")
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected, moments = exact(model), [state["exp_avg_sq"].clone() for state in optimizer.state.values()]
    amp.close()

    model, optimizer = begun(torch.bfloat16, into[0], master_weights=into[1])
    saved = torch.load(io.BytesIO(file.getvalue()))
    assert {value.dtype for value in saved["model"].values()} == {torch.float32}
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert_bitwise(exact(model), expected)
    assert_bitwise([state["exp_avg_sq"] for state in optimizer.state.values()], moments)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_close_gives_a_half_model_back_in_half_with_an_optimizer_that_steps_it(level: str, dtype: torch.dtype) -> None:
    keywords = {"master_weights": True} if level in FUNCTION_LEVELS else {}
    model, optimizer = begun(dtype, level, **keywords)
    train(MLP, model, optimizer, "cc")
    expected = {name: value.to(dtype) for name, value in model.state_dict().items()}
    amp.close()
    assert_bitwise(model.state_dict(), expected)
    assert weights_of(optimizer) == list(model.parameters())
    optimizer.zero_grad()
    model(torch.ones(2, 8)).float().square().mean().backward()
    optimizer.step()


class Lora(nn.Module):
    """A frozen linear layer, and an update of low rank beside it, in FP32."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        update = self.up(self.down(x.to(self.down.weight.dtype)))
        return self.base(x.to(self.base.weight.dtype)) + update


@pytest.mark.parametrize("in_the_groups", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_frozen_half_base_is_welcome(level: str, dtype: torch.dtype, make: Any, in_the_groups: bool) -> None:
    model = nn.Sequential(Lora(nn.Linear(8, 16, dtype=dtype)), nn.ReLU(), Lora(nn.Linear(16, 4, dtype=dtype)))
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = make([p for p in model.parameters() if p.requires_grad or in_the_groups])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        losses = train(MLP, model, optimizer, "cccc")
    assert all(loss == loss for loss in losses)
    assert all(p.detach().abs().sum() > 0 for name, p in model.named_parameters() if "up" in name)
    amp.close()
    expected = (
        {name: p.to(HALF.get(level, dtype)).to(dtype) for name, p in base.items()} if level in CAST_LEVELS else base
    )
    assert_bitwise({name: p.detach() for name, p in model.named_parameters() if name in base}, expected)


def trained_a_little(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for index in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(index))
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("options", [{}, {"master_weights": "split"}, {"masters_on": "cpu"}], ids=str)
@pytest.mark.parametrize("convert", [nn.Module.float, nn.Module.half])
def test_a_model_that_is_converted_keeps_its_masters(convert: Any, options: dict[str, Any]) -> None:
    if options and not has_native(torch.device("cpu")):
        pytest.skip("only compiled kernels take these options")
    model = Normed(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **options)
    trained_a_little(model, optimizer, 3)
    exact = frozen(dict(model.state_dict()))
    convert(model)
    if convert is nn.Module.float:
        assert_bitwise(dict(model.state_dict()), exact)
    if "master_weights" in options:
        with pytest.raises(AmpStateError, match="became torch.* after amp.initialize.*Leave the conversion out"):
            trained_a_little(model, optimizer, 1)
    elif convert is nn.Module.float:
        optimizer.param_groups[0]["lr"] = 0.0
        trained_a_little(model, optimizer, 2)
        assert_bitwise(dict(model.state_dict()), exact)


def test_a_converted_model_keeps_its_masters_through_a_step_of_the_classs_own() -> None:
    model = Normed(torch.bfloat16)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    trained_a_little(model, optimizer, 3)
    exact = frozen(dict(model.state_dict()))
    model.float()
    optimizer.param_groups[0]["lr"] = 0.0
    trained_a_little(model, optimizer, 2)
    assert_bitwise(dict(model.state_dict()), exact)
    assert_bitwise(dict(model.named_parameters()), exact)


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def test_a_part_that_outlives_the_model_keeps_its_masters() -> None:
    part = Normed(torch.bfloat16)

    def fine_tune(model: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
        trained_a_little(model, optimizer, 3)
        return frozen({name.removeprefix("model."): value for name, value in model.state_dict().items()})

    expected = fine_tune(Around(part))
    gc.collect()
    assert_bitwise(dict(part.state_dict()), expected)
    copied = copy.deepcopy(part)
    assert not any(torch.equal(value, expected[name]) for name, value in copied.state_dict().items() if "norm" in name)
    amp.close()
    assert {p.dtype for p in part.parameters()} == {torch.bfloat16}
    assert not any("amp" in name for module in part.modules() for name in vars(module))


def test_a_part_of_a_model_that_came_in_fp32_is_fp32_again_also_where_it_was_frozen() -> None:
    part = Normed(torch.float32)
    part.first.requires_grad_(False)

    def fine_tune(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
        trained_a_little(model, optimizer, 1)

    fine_tune(Around(part))
    gc.collect()
    amp.close()
    assert {p.dtype for p in part.parameters()} == {torch.float32}


def test_methods_and_parts_of_a_model_that_came_in_half_give_what_they_gave() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.gain = nn.Parameter(torch.eye(8))

        def encode(self, x: Tensor) -> Tensor:
            return self.first(x) @ self.gain

        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x)

    for came, given in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)):
        model = Encoder().to(came)
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O5", verbosity=0)
        x = torch.ones(2, 8, dtype=torch.bfloat16)
        assert model(x).dtype is torch.float32
        assert model.first(x).dtype is given
        if came is torch.bfloat16:
            assert model.encode(x).dtype is torch.bfloat16
        amp.close()


def test_labels_of_a_model_that_came_in_half_are_not_rounded() -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 1)

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return self.first(x), labels

    labels = torch.tensor([123.4, 250.7])
    for came, rounded in ((torch.bfloat16, False), (torch.float32, True)):
        model = Regression().to(came)
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O5", verbosity=0)
        for given in (model(torch.ones(2, 8), labels)[1], model(torch.ones(2, 8), labels=labels)[1]):
            assert torch.equal(given, labels) is not rounded
        amp.close()


def test_parameters_outside_of_the_models_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    model, other = Normed(torch.bfloat16), nn.Linear(4, 4).bfloat16()
    for models, count in ((model, 2), ([model, other], 0)):
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        amp.initialize(models, optimizer, opt_level="O5")
        said = f"SGD steps {count} low-precision parameters of no model given to amp.initialize"
        assert (said in capsys.readouterr().out) is bool(count)
        amp.close()
