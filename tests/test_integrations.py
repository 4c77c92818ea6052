"""`amp_engine.integrations` where a framework is missing; `make clients` trains through the real ones."""

import importlib
import re
import sys
from pathlib import Path

import pytest

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
