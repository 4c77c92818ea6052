"""`cast_inputs`: which arguments of a model are cast, and what is said where a cast loses what they say."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import AmpTypeError, AmpValueError, AmpWarning, RunPolicy, amp
from amp_engine.casting.inputs import lost
from amp_engine.ground.devices import HostNumbers
from tests.pretended_gpu import pretended_gpu
from tests.support import HALF

HALF_LEVELS = ("O2", "O3", "O5")


class Denoiser(nn.Module):
    """Notes the types that its forward gets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.time = nn.Linear(4, 8), nn.Linear(8, 8)
        self.given: dict[str, torch.dtype] = {}

    def forward(self, sample: Tensor, timestep: Tensor, *, scale: Tensor | None = None) -> Tensor:
        self.given = {"sample": sample.dtype, "timestep": timestep.dtype}
        if scale is not None:
            self.given["scale"] = scale.dtype
        angles = timestep[:, None] * torch.arange(1, 5) / 5
        return self.first(sample) + self.time(torch.cat([angles.sin(), angles.cos()], -1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


STEPS = torch.tensor([937.0, 938.0, 12.0, 500.0])
SAMPLE = torch.linspace(-2, 2, 16).reshape(4, 4)


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize(
    ("cast_inputs", "alone"),
    [
        (False, {"sample", "timestep", "scale"}),
        (["timestep"], {"timestep"}),
        ("timestep", {"timestep"}),
        (("scale", "timestep"), {"scale", "timestep"}),
        (True, set()),
    ],
)
def test_arguments_are_left_alone_by_their_names(level: str, cast_inputs: Any, alone: set[str]) -> None:
    model = Denoiser()
    amp.initialize(model, adamw(model), opt_level=level, verbosity=0, cast_inputs=cast_inputs)
    for call in (
        lambda: model(SAMPLE, torch.arange(4) + 0.1, scale=torch.ones(())),
        lambda: model(timestep=torch.arange(4) + 0.1, sample=SAMPLE, scale=torch.ones(())),
    ):
        assert call().dtype is torch.float32
        assert {name for name, dtype in model.given.items() if dtype is torch.float32} == alone


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_time_step_that_is_left_alone_keeps_its_value(level: str) -> None:
    model = Denoiser()
    expected = model(SAMPLE, STEPS)
    amp.initialize(model, adamw(model), opt_level=level, verbosity=0, cast_inputs=["timestep"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = model(SAMPLE, STEPS)
    assert (ours - expected).norm() / expected.norm() < 4 * torch.finfo(HALF[level]).eps


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_leave_the_same_arguments_alone(duplicate: Any) -> None:
    model = Denoiser()
    amp.initialize(model, opt_level="O5", verbosity=0, cast_inputs=["timestep"])
    twin = duplicate(model)
    twin(SAMPLE, STEPS)
    assert twin.given == {"sample": torch.bfloat16, "timestep": torch.float32}


def test_a_model_whose_forward_is_its_own_attribute_leaves_arguments_alone() -> None:
    model = Denoiser()
    own = model.forward
    model.forward = lambda timestep, sample: own(sample, timestep)  # type: ignore[method-assign]
    amp.initialize(model, opt_level="O5", verbosity=0, cast_inputs=["timestep"])
    model(STEPS, SAMPLE)
    assert model.given == {"sample": torch.bfloat16, "timestep": torch.float32}


def test_a_compiled_model_leaves_arguments_alone(dynamo: None) -> None:
    model = Denoiser()
    amp.initialize(model, opt_level="O5", verbosity=0, cast_inputs=["timestep"])
    expected = model(SAMPLE, STEPS)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(SAMPLE, STEPS), expected)
    amp.close()
    compiled = torch.compile(Denoiser(), backend="eager")
    amp.initialize(compiled, opt_level="O5", verbosity=0, cast_inputs=["timestep"])
    torch.testing.assert_close(compiled(SAMPLE, STEPS), expected)


class Gathering(nn.Module):
    """Has a part that takes a time step, and any number of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.denoiser = Denoiser()

    def forward(self, *args: Tensor) -> Tensor:
        return self.denoiser(*args)


def test_what_a_warning_advises_is_taken() -> None:
    for call, name in (
        (lambda model: model(SAMPLE, STEPS), "args[1]"),
        (lambda model: model.denoiser(SAMPLE, STEPS), "timestep"),
    ):
        model = amp.initialize(Gathering(), opt_level="O5", verbosity=0)
        with pytest.warns(AmpWarning, match=re.escape(f"Pass cast_inputs=['{name}'] to amp.initialize")):
            call(model)
        amp.close()
        model = amp.initialize(Gathering(), opt_level="O5", verbosity=0, cast_inputs=[name])
        call(model)
        assert model.denoiser.given == {"sample": torch.bfloat16, "timestep": torch.float32}
        amp.close()
    with pytest.raises(AmpValueError, match="cast_inputs names 'args', which"):
        amp.initialize(Gathering(), opt_level="O5", verbosity=0, cast_inputs=["args"])


def test_names_that_no_forward_has_are_refused_with_the_nearest() -> None:
    model = Denoiser()
    with pytest.raises(AmpValueError, match=r"cast_inputs names 'timesteps'.*Did you mean 'timestep'\?"):
        amp.initialize(model, opt_level="O5", verbosity=0, cast_inputs=["timesteps"])
    for wrong in (1, ["timestep", 2], {"timestep": False}):
        with pytest.raises(AmpTypeError, match='Use for example cast_inputs=\\["timestep"\\]'):
            amp.initialize(model, opt_level="O5", verbosity=0, cast_inputs=wrong)
    assert model.first.weight.dtype is torch.float32


def test_a_policy_file_has_them(tmp_path: Any) -> None:
    policy = RunPolicy("O5", cast_inputs=["timestep"])
    policy.save(tmp_path / "policy.json")
    assert RunPolicy.load(tmp_path / "policy.json") == policy
    model = Denoiser()
    amp.initialize(model, policy=tmp_path / "policy.json", verbosity=0)
    model(SAMPLE, STEPS)
    assert model.given == {"sample": torch.bfloat16, "timestep": torch.float32}
    for wrong in (1, [1]):
        with pytest.raises(AmpValueError, match="has to be true, false or a list of names of arguments"):
            RunPolicy("O5", cast_inputs=wrong)  # type: ignore[arg-type]


# --- what a cast loses ---------------------------------------------------------------------------------


def warned(model: nn.Module, *args: Any, level: str = "O5", calls: int = 1, **kwargs: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            model(*args, **kwargs)
    assert {one.category for one in caught} <= {AmpWarning}
    assert {one.filename for one in caught} <= {__file__}
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_cast_that_changes_whole_numbers_is_said_once_by_the_name_of_the_argument(level: str) -> None:
    model = Denoiser()
    amp.initialize(model, opt_level=level, verbosity=0)
    steps = torch.tensor([4685.0, 4700.0, 12.0, 500.0])  # float16 has all whole numbers up to 2048
    said = warned(model, SAMPLE, steps, calls=5)
    largest = {"O2": 2048, "O5": 256}[level]
    half = str(HALF[level])[len("torch.") :]
    assert len(said) == 1
    assert said[0].startswith(
        f"The cast of the argument 'timestep' of Denoiser to {half} changed whole numbers: {half} holds them up to "
        f"{largest}.  Pass cast_inputs=['timestep'] to amp.initialize"
    )


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, features: Tensor, **others: Any) -> Tensor:
        return self.layer(features)


RANDOM = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
LOST = {
    "an offset": 1000 + 0.01 * RANDOM,
    "a column with an offset": torch.cat([RANDOM[:, :7], 290 + 0.1 * RANDOM[:, 7:]], 1),
    "a column of years": torch.cat([RANDOM[:, :7], (2001 + torch.arange(64.0) % 24)[:, None]], 1),
    "seconds of a day": 1.7e9 + 1000 * RANDOM,
    "two close times": torch.tensor([[0.9371] * 8, [0.9373] * 8]),
}
KEPT = {
    "normal": RANDOM,
    "normal, one row": RANDOM[:1],
    "normal, a large offset of the batch": RANDOM + 10,
    "sparse": RANDOM * (RANDOM > 1),
    "constant": torch.full((64, 8), 1000.01),
    "constant but for rounding": torch.full((64, 8), 1000.0) * (1 + 1e-7 * RANDOM),
    "small whole numbers": torch.arange(512.0).reshape(64, 8) % 250,
    "masks": torch.where(RANDOM > 0, 0.0, -torch.inf),
    "masks of the lowest number": torch.where(RANDOM > 0, 0.0, torch.finfo(torch.float32).min),
    "not a number": torch.full((64, 8), torch.nan),
    "images": torch.arange(512.0).reshape(64, 8) % 256 / 255,
    "half": 1000 + RANDOM.bfloat16(),
    "empty": RANDOM[:0],
}


@pytest.mark.parametrize("name", LOST)
def test_a_cast_that_makes_distinct_values_equal_is_said(name: str) -> None:
    model = Table()
    amp.initialize(model, opt_level="O5", verbosity=0)
    said = warned(model, LOST[name])
    assert len(said) == 1
    assert said[0].startswith("The cast of the argument 'features' of Table to bfloat16 ")


@pytest.mark.parametrize("shape", [(100,), (100, 1)])
def test_the_only_number_of_a_row_is_said_where_rows_become_equal(shape: tuple[int, ...]) -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2)

        def forward(self, t: Tensor) -> Tensor:
            return self.layer(t.reshape(-1, 1))

    times = torch.arange(100).reshape(shape) / 1000 + 0.9
    model = amp.initialize(Timed(), opt_level="O5", verbosity=0)
    assert "argument 't' of Timed to bfloat16 made distinct values equal" in warned(model, times)[0]
    assert warned(amp.initialize(Timed(), opt_level="O5", verbosity=0), times[::10]) == []


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_nothing_is_said_of_usual_inputs(level: str, name: str) -> None:
    model = Table()
    amp.initialize(model, opt_level=level, verbosity=0)
    assert warned(model, KEPT[name], calls=4) == []


@pytest.mark.parametrize("kind", [lambda x: {"x": [x]}, lambda x: (x,), lambda x: [{"x": x}]])
def test_inputs_in_containers_are_looked_at(kind: Any) -> None:
    model = Table()
    amp.initialize(model, opt_level="O5", verbosity=0)
    assert "argument 'batch' of Table" in warned(model, RANDOM, batch=kind(STEPS))[0]


def test_parts_that_a_script_calls_are_looked_at() -> None:
    model = nn.ModuleDict({"table": Table()})
    amp.initialize(model, opt_level="O5", verbosity=0)
    assert "argument 'features' of Table" in warned(model["table"], LOST["an offset"])[0]


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_levels_without_half_inputs_say_nothing(level: str) -> None:
    model = Table()
    amp.initialize(model, opt_level=level, verbosity=0)
    assert warned(model, LOST["an offset"].double() if level == "O0" else LOST["an offset"]) == []


def test_looking_waits_for_no_gpu() -> None:
    with pretended_gpu() as gpu:
        x = LOST["an offset"].clone()
        gpu.put(x)
        flags = HostNumbers(lost(x, torch.bfloat16))
        assert not flags.is_known()
        assert any(flags.is_known() for _ in range(1000))
        assert gpu.waits == 0
        assert flags.values == [0.0, 1.0]


# --- the search for what must stay FP32 ------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_search_for_fp32_modules_finds_that_it_is_the_input(level: str) -> None:
    class Centring(Table):
        def forward(self, features: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
            return self.layer(100 * (features - 1000)) * weights

    x, weights = LOST["an offset"], torch.ones(64, 1)
    target = 100 * (x - 1000).sum(1, keepdim=True)
    found = amp.find_fp32_modules(
        Centring(), lambda model: (model(x, weights=weights).float() - target).square().mean(), level
    )
    assert found.is_acceptable
    assert found.is_minimal
    assert found.modules == ()
    assert found.uncast == ("features",)
    assert found.policy.cast_inputs == ("features",)
    assert f"{level} needs the input features as given, by cast_inputs=['features']: then" in str(found)
