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
from tests.support import assert_bitwise

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


def test_the_plugin_for_lightning_initializes_the_module_whose_parts_are_called(over):
    stand_ins = {name: {"Precision": object} for name in ("lightning.fabric.plugins", "lightning.pytorch.plugins")}
    plugin = over("lightning", stand_ins).AmpPrecision("O2", verbosity=0)
    module = nn.Module()
    module.head, module.blocks, module.loss = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)]), nn.MSELoss()
    plugin.connect(module, [torch.optim.SGD(module.parameters(), lr=0.1)], [])
    for part in (module.head, module.blocks[0]):
        assert part.weight.dtype is torch.float16
        part(torch.ones(1, 4))  # FP32, as a batch that training_step is given


def test_the_plugin_for_lightning_loads_weights_into_the_masters_that_it_made(over):
    """Lightning loads them before it connects the plugin."""
    stand_ins = {name: {"Precision": object} for name in ("lightning.fabric.plugins", "lightning.pytorch.plugins")}
    plugin = over("lightning", stand_ins).AmpPrecision("O5", verbosity=0)
    module, saved = nn.Linear(4, 4).to(torch.bfloat16), dict(nn.Linear(4, 4).state_dict())
    module.load_state_dict(saved)
    plugin.connect(module, [torch.optim.SGD(module.parameters(), lr=0.1)], [])
    plugin.on_load_checkpoint({"state_dict": saved})
    assert_bitwise(dict(module.state_dict()), saved)
    plugin.teardown()
    plugin.on_load_checkpoint({"state_dict": {}})


class Trains:
    """What AmpTrainer uses of transformers' Trainer."""

    def __init__(self, model):
        self.model, self.args, self.saved = model, SimpleNamespace(should_save=True, output_dir="."), []

    def _save(self, output_dir, state_dict):
        self.saved.append(state_dict)

    def _load_from_checkpoint(self, checkpoint):
        self.saved.append(f"weights of {checkpoint}")

    def _load_optimizer_and_scheduler(self, checkpoint):
        self.saved.append(f"optimizer of {checkpoint}")


class Pretrained(nn.Linear):
    @property
    def dtype(self):
        return self.weight.dtype


class Config(dict):
    def save_pretrained(self, folder):
        self.saved_as = folder, self["dtype"]


TRANSFORMERS = {
    "accelerate": {},
    "transformers": {"Trainer": Trains},
    "amp_engine.integrations.accelerate": {"use": lambda accelerator, **options: accelerator},
}


def test_the_trainer_loads_weights_into_the_masters_that_it_made(over):
    """transformers loads them before it makes the optimizer, and again only for DeepSpeed and FSDP."""
    trainer = over("transformers", TRANSFORMERS).AmpTrainer(Pretrained(4, 4))
    trainer._load_optimizer_and_scheduler(None)
    trainer._load_optimizer_and_scheduler("folder")
    assert trainer.saved == ["optimizer of None", "weights of folder", "optimizer of folder"]


def test_what_the_trainer_saves_says_the_type_in_which_its_model_came(over):
    trainer = over("transformers", TRANSFORMERS).AmpTrainer(Pretrained(4, 4))
    trainer.model.config = Config()
    trainer._save()
    assert trainer.model.config == {}
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    amp.initialize(trainer.model, optimizer, opt_level="O2", verbosity=0)
    given = {"weight": torch.zeros(1)}
    trainer._save(state_dict=given)
    assert trainer.model.config.saved_as == (".", "float32")
    trainer._save("folder")
    assert trainer.model.config.saved_as == ("folder", "float32")
    assert trainer.saved == [None, given, None]
