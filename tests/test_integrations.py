"""`amp_engine.integrations` where a framework is missing; `make clients` trains through the real ones."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
def amp_scaler(monkeypatch):
    """AmpScaler over a stand-in for what it takes from timm."""
    for name in ("timm", "timm.utils", "timm.utils.clip_grad"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["timm.utils"], "NativeScaler", object, raising=False)
    monkeypatch.setattr(sys.modules["timm.utils.clip_grad"], "dispatch_clip_grad", halve, raising=False)
    monkeypatch.delitem(sys.modules, "amp_engine.integrations.timm", raising=False)
    yield importlib.import_module("amp_engine.integrations.timm").AmpScaler
    sys.modules.pop("amp_engine.integrations.timm")


def halve(parameters, value, mode):
    for weight in parameters:
        weight.grad = weight.grad * 0.5


CLIPPED = {
    "": lambda model, optimizer: None,
    "norm": lambda model, optimizer: amp.clip_grad_norm_(model.parameters(), 0.1),
    "value": lambda model, optimizer: amp.clip_grad_value_(model.parameters(), 0.1),
    "agc": lambda model, optimizer: halve(amp.master_params(optimizer), 0.1, "agc"),
}


@pytest.mark.parametrize("mode", CLIPPED)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_the_scaler_for_timm_accumulates_clips_and_skips_as_scale_loss_does(amp_scaler, level, mode):
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
