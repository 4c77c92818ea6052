"""`amp_engine.integrations` where a framework is missing; `make clients` trains through the real ones."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from amp_engine import amp
from tests.models import NORMED_MLP
from tests.support import assert_bitwise, backward, frozen, started

ROOT = Path(__file__).parent.parent
MODULES = {path.stem for path in (ROOT / "amp_engine" / "integrations").glob("*.py")}
FRAMEWORKS = sorted(MODULES - {"__init__", "extras"})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_missing_framework_is_named_with_its_extra(monkeypatch, framework):
    for name in ("accelerate", "diffusers", "lightning", "timm", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in FRAMEWORKS:
        monkeypatch.delitem(sys.modules, f"amp_engine.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"Type pip install --upgrade 'amp_engine\[{framework}\]'"):
        importlib.import_module(f"amp_engine.integrations.{framework}")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_framework_has_an_extra_and_a_section(framework):
    assert re.search(rf'^{framework} = \[.*"{framework}>=', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"amp_engine.integrations.{framework} import" in (ROOT / f"docs/frameworks/{framework}.md").read_text()


@pytest.fixture
def over(monkeypatch):
    """Import our module for a framework over stand-ins: the names that it takes from each module."""

    def imported(framework, stand_ins):
        for name, names in stand_ins.items():
            module = ModuleType(name)
            vars(module).update(names)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, f"amp_engine.integrations.{framework}", raising=False)
        return importlib.import_module(f"amp_engine.integrations.{framework}")

    yield imported
    for framework in FRAMEWORKS:
        sys.modules.pop(f"amp_engine.integrations.{framework}", None)


def halve(parameters, value, mode):
    for weight in parameters:
        weight.grad = weight.grad * 0.5


CLIPPED = {
    "": lambda model, optimizer: None,
    "norm": lambda model, optimizer: amp.clip_grad_norm_(model.parameters(), 0.1),
    "value": lambda model, optimizer: amp.clip_grad_value_(model.parameters(), 0.1),
    "agc": lambda model, optimizer: halve(amp.master_params(optimizer), 0.1, "agc"),
}
TIMM = {"timm.utils": {"NativeScaler": object}, "timm.utils.clip_grad": {"dispatch_clip_grad": halve}}


@pytest.mark.parametrize("mode", CLIPPED)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_the_scaler_for_timm_accumulates_clips_and_skips_as_scale_loss_does(over, level, mode):
    amp_scaler = over("timm", TIMM).AmpScaler

    def run(by_timm):
        model, optimizer = started(level)
        scaler = amp_scaler(device="cpu")
        for index, outcome in enumerate("cccccococ"):
            is_last = index % 3 == 2
            loss = NORMED_MLP.loss(model, NORMED_MLP.batch(index)) / 3
            if by_timm:
                clip = {"clip_grad": 0.1, "clip_mode": mode, "parameters": model.parameters()} if mode else {}
                scaler(loss * (float("inf") if outcome == "o" else 1), optimizer, need_update=is_last, **clip)
            else:
                backward(loss, optimizer, overflow=outcome == "o", delay_unscale=not is_last)
                if is_last:
                    CLIPPED[mode](model, optimizer)
                    optimizer.step()
            if is_last:
                optimizer.zero_grad()
        if level in ("O1", "O2"):
            assert amp.last_step(optimizer).skipped
        return frozen([dict(model.state_dict()), [w.detach() for w in amp.master_params(optimizer)]])

    expected = run(by_timm=False)
    amp.close()
    assert_bitwise(run(by_timm=True), expected)


def test_the_scaler_for_timm_clips_the_parameters_it_is_given_or_all(over):
    scaler = over("timm", TIMM).AmpScaler()
    model, optimizer = started("O1")
    first, *others = model.parameters()
    for given in ({}, {"parameters": [first]}):
        optimizer.zero_grad()
        scaler(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer, clip_grad=1e-3, **given)
        assert first.grad.norm() < 1.01e-3
        assert (torch.nn.utils.get_total_norm([p.grad for p in others]) < 1.01e-3) == (not given)


def test_the_plugin_for_lightning_initializes_the_children_that_steps_call_also_in_containers(over):
    stand_ins = {name: {"Precision": object} for name in ("lightning.fabric.plugins", "lightning.pytorch.plugins")}
    plugin = over("lightning", stand_ins).AmpPrecision("O2", verbosity=0)
    module = nn.Module()
    module.head, module.blocks, module.loss = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)]), nn.MSELoss()
    plugin.connect(module, [torch.optim.SGD(module.parameters(), lr=0.1)], [])
    for part in (module.head, module.blocks[0]):
        assert part.weight.dtype is torch.float16
        assert part(torch.ones(1, 4)).dtype is torch.float32  # as the outputs of a model that was initialized


class Trains:
    """What AmpTrainer uses of transformers' Trainer."""

    def __init__(self, model):
        self.model, self.args, self.saved = model, SimpleNamespace(should_save=True, output_dir="."), []

    def create_optimizer(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def _save(self, output_dir, state_dict):
        self.saved.append(state_dict)


class Pretrained(nn.Linear):
    @property
    def dtype(self):
        return self.weight.dtype


class Config(dict):
    def save_pretrained(self, folder):
        self.saved_as = self["dtype"]


def test_the_trainer_saves_fp32_of_a_model_that_it_cast_and_any_other_as_transformers_does(over):
    stand_ins = {
        "accelerate": {},
        "transformers": {"Trainer": Trains},
        "amp_engine.integrations.accelerate": {"use": lambda accelerator, **options: accelerator},
    }
    trainer = over("transformers", stand_ins).AmpTrainer(Pretrained(4, 4))
    trainer.model.config = Config()
    trainer._save()
    trainer.create_optimizer()
    trainer._save()
    assert trainer.saved == [None, None]
    assert trainer.model.config == {}
    amp.initialize(trainer.model, trainer.optimizer, opt_level="O2", verbosity=0)
    given = {"weight": torch.zeros(1)}
    trainer._save(state_dict=given)
    trainer._save()
    assert trainer.saved[2] is given
    assert {name: value.dtype for name, value in trainer.saved[3].items()} == dict.fromkeys(
        ("weight", "bias"), torch.float32
    )
    assert trainer.model.config.saved_as == "float32"
