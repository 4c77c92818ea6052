"""The policy file: what `initialize(policy=...)` reads, which modules it keeps in FP32, and how they are given back."""

from __future__ import annotations

import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import amp_engine
from amp_engine import AmpStateError, AmpTypeError, AmpValueError, DynamicLossScale, Engine, RunPolicy, amp
from amp_engine.casting.keep_float import is_kept
from tests.support import CAST_LEVELS, LEVELS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Block(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def written(path: Path, **keys: Any) -> Path:
    path.write_text(json.dumps({"format": 1, **keys}))
    return path


def kept_in(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_kept(module)]


def hooks_of(model: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


ALL = {
    "O2": {
        "keep_float": ["encoder.norm", "head"],
        "cast_model_type": "bfloat16",
        "keep_batchnorm_fp32": False,
        "master_weights": True,
        "loss_scale": "dynamic(growth_interval=5)",
        "cast_model_outputs": "bfloat16",
        "min_loss_scale": 0.5,
        "max_loss_scale": 256.0,
        "moment_dtype": "bfloat16",
    },
    "O3": {"cast_model_type": False},
    "O5": {"master_weights": "24bit", "moment_dtype": "8bit"},
}


@pytest.mark.parametrize("level", ALL)
def test_what_is_saved_is_read_back(tmp_path: Path, level: str) -> None:
    policy = RunPolicy(level, **ALL[level])  # type: ignore[arg-type]
    policy.save(tmp_path / "policy.json")
    assert json.loads((tmp_path / "policy.json").read_text()) == {
        "format": 1,
        "opt_level": level,
        "keep_float": [],
        **ALL[level],
    }
    assert RunPolicy.load(tmp_path / "policy.json") == policy
    assert RunPolicy.from_json(policy.to_json()) == policy == pickle.loads(pickle.dumps(policy))


def test_types_and_rules_are_written_by_name() -> None:
    policy = RunPolicy(
        "O5", ["a"], loss_scale=DynamicLossScale(hysteresis=2), moment_dtype=torch.bfloat16, cast_model_outputs="half"
    )
    assert policy.overrides == {
        "loss_scale": "dynamic(hysteresis=2)",
        "cast_model_outputs": "half",
        "moment_dtype": "bfloat16",
    }
    assert policy.keep_float == ("a",)
    assert "a kept in FP32" in str(policy)
    assert amp_engine.RunPolicy is amp.RunPolicy is RunPolicy


@pytest.mark.parametrize("given", ["path", "text", "record"])
@pytest.mark.parametrize("level", LEVELS)
def test_initialize_does_what_the_file_says(tmp_path: Path, level: str, given: str) -> None:
    path = written(tmp_path / "policy.json", opt_level=level, keep_float=["encoder.norm"], loss_scale=32.0)
    model = Net()
    before = hooks_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = {"path": path, "text": str(path), "record": RunPolicy.load(path)}[given]
    with Engine() as engine:
        assert engine.initialize(model, optimizer, policy=policy, verbosity=0) == (model, optimizer)  # type: ignore[arg-type]
        assert engine.policy is not None
        assert engine.policy.opt_level == level
        assert engine.policy.loss_scale == 32.0
        assert kept_in(model) == ["encoder.norm"]
        assert model.encoder.norm.weight.dtype is torch.float32
        if level in CAST_LEVELS[1:]:
            assert model.head.weight.dtype is engine.policy.cast_model_type
        with engine.scale_loss(model(torch.randn(3, 4)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert kept_in(model) == []
    assert hooks_of(model) == before


def test_every_override_reaches_the_run(tmp_path: Path) -> None:
    path = written(tmp_path / "policy.json", opt_level="O2", **ALL["O2"])
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with Engine() as engine:
        engine.initialize(model, optimizer, policy=path, verbosity=0)
        policy = engine.policy
        assert policy is not None
        assert policy.cast_model_type is torch.bfloat16
        assert policy.keep_batchnorm_fp32 is False
        assert policy.loss_scale == DynamicLossScale(growth_interval=5)
        assert (engine.min_loss_scale, engine.max_loss_scale) == (0.5, 256.0)
        assert model(torch.randn(2, 4)).dtype is torch.bfloat16
        with engine.scale_loss(model(torch.randn(3, 4)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.bfloat16}


def test_arguments_overrule_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "policy.json", opt_level="O2", **ALL["O2"])
    with Engine() as engine:
        model = engine.initialize(
            Net(),
            policy=path,
            opt_level="O2",
            loss_scale=4.0,
            max_loss_scale=8.0,
            cast_model_type=torch.float16,
            cast_model_outputs=torch.float32,
            verbosity=0,
        )
        assert engine.policy is not None
        assert engine.policy.loss_scale == 4.0
        assert engine.policy.cast_model_type is torch.float16
        assert (engine.min_loss_scale, engine.max_loss_scale) == (0.5, 8.0)
        assert model(torch.randn(2, 4)).dtype is torch.float32


# Each default of `initialize`, written out beside a file that says something else.
@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("by", ["engine", "amp", "subclass"])
def test_a_default_that_is_written_out_overrules_the_file(tmp_path: Path, by: str, positional: bool) -> None:
    path = written(tmp_path / "policy.json", opt_level="O2", max_loss_scale=256.0, loss_scale="dynamic")

    class Own(Engine):
        """A user's."""

    engine = Engine() if by == "engine" else Own()
    for keywords, expected in (({"max_loss_scale": 2**24}, 2.0**24), ({}, 256.0), ({"max_loss_scale": None}, 256.0)):
        model = nn.Linear(4, 2)
        initialize = amp.initialize if by == "amp" else engine.initialize
        if positional and keywords:
            more = [None, None, None, None, None, None, 1, 0, None, keywords["max_loss_scale"]]
            initialize(model, None, True, "O2", *more, policy=path)
        else:
            initialize(model, policy=path, verbosity=0, **keywords)
        used = amp.current_engine() if by == "amp" else engine
        assert used is not None
        assert used.max_loss_scale == expected
        assert used.policy is not None
        assert used.policy.opt_level == "O2"
        used.close()


def test_the_default_level_that_is_written_out_is_another_than_the_files(tmp_path: Path) -> None:
    path = written(tmp_path / "policy.json", opt_level="O2")
    model = nn.Linear(4, 2)
    for call in (
        lambda: Engine().initialize(model, opt_level="O1", policy=path),
        lambda: Engine().initialize(model, None, True, "O1", policy=path),
        lambda: amp.initialize(model, opt_level="O1", policy=path),
    ):
        with pytest.raises(AmpValueError, match="opt_level='O1' was given with a policy for 'O2'"):
            call()
    assert model.weight.dtype is torch.float32


def test_signatures_show_the_defaults() -> None:
    for initialize in (amp.initialize, Engine().initialize, Engine.initialize):
        parameters = inspect.signature(initialize).parameters
        assert (parameters["opt_level"].default, parameters["max_loss_scale"].default) == ("O1", 2.0**24)
        assert parameters["policy"].default is None


def test_another_level_than_the_policys_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "policy.json", opt_level="O2", keep_float=["head"])
    model = Net()
    with pytest.raises(AmpValueError, match=r"opt_level='O5' was given with a policy for 'O2' \(.*policy.json\)"):
        Engine().initialize(model, opt_level="O5", policy=path)
    assert kept_in(model) == []


def test_not_enabled_keeps_nothing_and_reads_nothing(tmp_path: Path) -> None:
    model = Net()
    with Engine() as engine:
        engine.initialize(model, enabled=False, policy=tmp_path / "there is none.json")
        assert kept_in(model) == []


def test_close_leaves_what_the_user_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "policy.json", opt_level="O1", keep_float=["encoder.norm", "encoder.linear", "head"])
    model = Net()
    amp.keep_float(model.encoder.norm)  # before
    amp.initialize(model, policy=path, verbosity=0)
    amp.keep_float(model.head)  # afterwards, while the policy has kept it
    assert kept_in(model) == ["encoder.linear", "encoder.norm", "head"]
    amp.close()
    assert kept_in(model) == ["encoder.norm", "head"]


def test_several_calls_and_close(tmp_path: Path) -> None:
    first, second = Net(), Net()
    with Engine() as engine:
        engine.initialize(first, policy=RunPolicy("O2", ["head"]), verbosity=0)
        engine.initialize(second, policy=RunPolicy("O2", ["encoder"]), verbosity=0)
        assert (kept_in(first), kept_in(second)) == (["head"], ["encoder"])
    assert (kept_in(first), kept_in(second)) == ([], [])


# --- names ----------------------------------------------------------------------------------------


def test_several_models_are_named_by_their_places() -> None:
    models: list[nn.Module] = [Net(), Net(), nn.Linear(2, 2)]
    with Engine() as engine:
        engine.initialize(models, policy=RunPolicy("O2", ["models[1].encoder.norm", "models[2]"]), verbosity=0)
        assert [kept_in(model) for model in models] == [[], ["encoder.norm"], [""]]
        with pytest.raises(
            AmpValueError, match=r"no module has that name in the 3 models.  Near are .*\.encoder\.norm"
        ):
            Engine().initialize(models, policy=RunPolicy("O2", ["encoder.norm"]), verbosity=0)


def test_the_model_itself_has_the_empty_name() -> None:
    model = Net()
    with Engine() as engine:
        engine.initialize(model, policy=RunPolicy("O2", [""]), verbosity=0)
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["encoder.norm", "_orig_mod.encoder.norm", "module.encoder.norm"])
def test_names_of_compiled_models_and_of_plain_ones_are_the_same(name: str, dynamo: None) -> None:
    for model in (Net(), torch.compile(Net(), backend="eager")):
        assert isinstance(model, nn.Module)
        with Engine() as engine:
            engine.initialize(model, policy=RunPolicy("O2", [name]), verbosity=0)
            assert [kept.removeprefix("_orig_mod.") for kept in kept_in(model)] == ["encoder.norm"]
    net = Net()
    net.encoder = torch.compile(net.encoder, backend="eager")  # type: ignore[assignment]
    with Engine() as engine:
        engine.initialize(net, policy=RunPolicy("O2", ["encoder.norm"]), verbosity=0)
        assert kept_in(net) == ["encoder._orig_mod.norm"]


@pytest.mark.parametrize("name", ["encoder.norm", "module.encoder.norm"])
def test_names_of_models_in_distributed_data_parallel(name: str, one_process_group: None) -> None:
    model = DistributedDataParallel(Net())
    with Engine() as engine:
        engine.initialize(model, policy=RunPolicy("O1", [name]), verbosity=0)
        assert kept_in(model) == ["module.encoder.norm"]
    del model


def test_a_part_that_is_called_module_is_found_by_its_name() -> None:
    model = nn.Module()
    model.module = Net()
    with Engine() as engine:
        engine.initialize(model, policy=RunPolicy("O2", ["module.head"]), verbosity=0)
        assert kept_in(model) == ["module.head"]


def test_a_module_with_two_names_is_found_by_either() -> None:
    model = Net()
    model.tail = model.head
    with Engine() as engine:
        engine.initialize(model, policy=RunPolicy("O2", ["tail", "head"]), verbosity=0)
        assert kept_in(model) == ["head"]
    assert hooks_of(model) == hooks_of(Net())


def test_unknown_names_are_refused_with_those_that_are_near() -> None:
    model = Net()
    before = {name: p.dtype for name, p in model.state_dict().items()}
    with Engine() as engine, pytest.raises(AmpValueError) as caught:
        engine.initialize(model, policy=RunPolicy("O2", ["head", "encoder.nrom"]), verbosity=0)
    assert "'encoder.nrom'" in str(caught.value)
    assert "Near are encoder.norm" in str(caught.value)
    assert "in this Net" in str(caught.value)
    assert kept_in(model) == []
    assert {name: p.dtype for name, p in model.state_dict().items()} == before


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"num_losses": 0}, AmpValueError),
        ({"loss_scale": "none"}, AmpValueError),
        ({"process_group": 3}, AmpTypeError),
        ({"optimizers": 3}, AmpTypeError),
        ({"min_loss_scale": 3.0, "max_loss_scale": 2.0}, AmpValueError),
        ({"optimizers": torch.optim.LBFGS(nn.Linear(1, 1).parameters())}, AmpStateError),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.__name__,
)
def test_if_initialize_raises_nothing_stays_kept(keywords: dict[str, Any], error: type[Exception]) -> None:
    model = Net()
    amp.keep_float(model.encoder)
    before = hooks_of(model)
    with pytest.raises(error):
        amp.initialize(model, policy=RunPolicy("O2", ["head", "encoder"]), verbosity=0, **keywords)
    assert kept_in(model) == ["encoder"]
    assert hooks_of(model) == before


def test_shards_at_a_level_that_casts_models_are_refused(one_process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model, mp_policy=amp.fsdp_policy("O2", root=True))
    with pytest.raises(AmpStateError, match="Linear in its unit of fully_shard, which O2 keeps in FP32"):
        amp.initialize(model, policy=RunPolicy("O2", ["head"]), verbosity=0)
    assert kept_in(model) == []


# --- files that are no policy ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[]", "holds no object"),
        ('{"opt_level": "O2"}', '"format": 1'),
        ('{"format": 2, "opt_level": "O2"}', '"format": 1'),
        ('{"format": true, "opt_level": "O2"}', '"format": 1'),
        ('{"format": 1}', "no opt_level"),
        ('{"format": 1, "opt_level": "O7"}', "opt_level is 'O7', and has to be one of O0, O1"),
        ('{"format": 1, "opt_level": 2}', "opt_level is 2, and has to be a level"),
        ('{"format": 1, "opt_level": "O2", "keepfloat": []}', "Did you mean 'keep_float'"),
        ('{"format": 1, "opt_level": "O2", "other": []}', "which is none of opt_level, keep_float"),
        ('{"format": 1, "opt_level": "O2", "keep_float": "head"}', "has to be a list of names"),
        ('{"format": 1, "opt_level": "O2", "keep_float": [1]}', "has to be a list of names"),
        ('{"format": 1, "opt_level": "O2", "keep_batchnorm_fp32": "True"}', "has to be true or false"),
        ('{"format": 1, "opt_level": "O1", "keep_batchnorm_fp32": true}', "keep_batchnorm_fp32 should be None"),
        ('{"format": 1, "opt_level": "O2", "master_weights": "halves"}', '"split"'),
        ('{"format": 1, "opt_level": "O2", "loss_scale": -1}', "loss_scale=-1"),
        ('{"format": 1, "opt_level": "O2", "loss_scale": true}', "loss_scale is True"),
        ('{"format": 1, "opt_level": "O2", "loss_scale": NaN}', "loss_scale=nan"),
        ('{"format": 1, "opt_level": "O2", "max_loss_scale": "1"}', "max_loss_scale is '1', and has to be a number"),
        ('{"format": 1, "opt_level": "O2", "moment_dtype": "int8"}', "moment_dtype='int8'"),
        ('{"format": 1, "opt_level": "O2", "cast_model_type": true}', "or false"),
    ],
)
def test_what_is_no_policy_is_refused_with_what_to_write(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)
    model = Net()
    with pytest.raises(AmpValueError) as caught:
        amp.initialize(model, policy=path, verbosity=0)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert hooks_of(model) == hooks_of(Net())
    assert amp.current_engine() is None


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        amp.initialize(Net(), policy=tmp_path / "none.json", verbosity=0)
    with pytest.raises(AmpTypeError, match="policy is a dict"):
        amp.initialize(Net(), policy={"opt_level": "O2"}, verbosity=0)  # type: ignore[call-overload]
