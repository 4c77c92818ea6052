"""The wheel of `make dist`: which extension a torch gets, and what another torch is told. Nothing is compiled."""

import json
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from amp_engine.kernels import _native
from tests.wheels.merge import LACKS_CUDA, collect, kind_of, merge

SUFFIX = EXTENSION_SUFFIXES[0]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages as pip builds them, for torch 2.97.1 and 2.99.0. A text, its torch, stands for an extension."""
    monkeypatch.delenv("AMP_ENGINE_BUILD", raising=False)
    packages = []
    for version in ("2.97.1+cu130", "2.99.0+cpu"):
        package = tmp_path / version
        package.mkdir()
        (package / f"_C{SUFFIX}").write_text(version)
        record = {"mode": "cpu", "torch": version, "reason": None}
        (package / f"_C{SUFFIX}").with_suffix(".json").write_text(json.dumps(record))
        packages.append(package)

    def opened(path):
        return SimpleNamespace(build_info=lambda: {"torch": path.read_text().split("+")[0]})

    monkeypatch.setattr(_native, "import_from", opened)
    return packages


def load(package, version, monkeypatch):
    """Load an extension as _native.py does at an import with this torch."""
    monkeypatch.setattr(torch, "__version__", version)
    extension = _native.find(package, version)
    return _native.load(extension, _native.read_record(extension))


@pytest.mark.parametrize(
    ("version", "built"),
    [("2.97.1", "2.97.1"), ("2.97.0+cpu", "2.97.1"), ("2.99.0", "2.99.0"), ("2.99.10+cu131", "2.99.0")],
)
def test_a_torch_gets_the_extension_of_its_minor_version(packages, monkeypatch, version, built):
    collect(packages, "cpu")
    module, reason = load(packages[-1], version, monkeypatch)
    assert (module.build_info()["torch"], reason) == (built, None)


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ("2.98.0", "2.97 and 2.99"),
        ("2.100.0+cpu", "2.97 and 2.99"),
        ("2.9.9", "2.97 and 2.99"),
        ("2.99.0a0+nv26.1", "2.99"),
    ],
)
def test_another_torch_is_told_so_in_one_line_and_what_to_type(packages, monkeypatch, version, has):
    collect(packages, "cpu")
    with pytest.warns(RuntimeWarning) as told:
        module, reason = load(packages[-1], version, monkeypatch)
    assert module is None
    assert [str(line.message) for line in told] == [
        f"amp_engine does not use its compiled kernels: {reason}.  Until then {_native.WITHOUT}"
    ]
    assert reason == (
        f"they were compiled against torch {has}, and torch {version} is installed; run: {_native.INSTALL}"
    )


def test_an_extension_of_a_wheel_that_does_not_load_is_told_in_one_line(packages, monkeypatch):
    collect(packages, "cpu")

    def fail(path):
        raise ImportError(f"{path}: undefined symbol: _ZN3c10")

    monkeypatch.setattr(_native, "import_from", fail)
    with pytest.warns(
        RuntimeWarning, match="does not use its compiled kernels: .*undefined symbol: _ZN3c10.*; run: pip"
    ) as told:
        assert load(packages[-1], "2.99.1", monkeypatch)[0] is None
    assert len(told) == 1


def test_an_extension_under_the_name_of_another_minor_version_is_refused(packages, monkeypatch):
    collect(packages, "cpu")
    _native.find(packages[-1], "2.99.0").write_text("2.97.1")
    with pytest.warns(RuntimeWarning, match="compiled against torch 2.97.1, and torch 2.99.0 is installed"):
        assert load(packages[-1], "2.99.0", monkeypatch)[0] is None


def test_a_build_from_the_sources_fits_its_own_torch_alone(packages, monkeypatch):
    assert load(packages[-1], "2.99.0+cpu", monkeypatch)[1] is None
    for other in ("2.99.1+cpu", "2.99.0+cu130"):
        with pytest.warns(RuntimeWarning, match=f"against torch 2.99.0.cpu, and torch {other.replace('+', '.')}"):
            load(packages[-1], other, monkeypatch)


def test_each_extension_has_a_record(packages):
    collect(packages, "cpu")
    records = {path.name: json.loads(path.read_text()) for path in packages[-1].glob("*.json")}
    json_suffix = str(Path(SUFFIX).with_suffix(".json"))
    assert records == {
        f"_C_2_97{json_suffix}": {"mode": "cpu", "torch": "2.97", "reason": LACKS_CUDA},
        f"_C_2_99{json_suffix}": {"mode": "cpu", "torch": "2.99", "reason": LACKS_CUDA},
        f"_C{json_suffix}": {"mode": "cpu", "torch": "2.97 and 2.99", "reason": LACKS_CUDA},
    }
    assert sorted(path.name for path in packages[-1].glob("*.so")) == [f"_C_2_97{SUFFIX}", f"_C_2_99{SUFFIX}"]


def wheel(tag):
    return Path(f"amp_engine-0.1.0-{tag}-cp311-cp311-linux_x86_64.whl")


@pytest.mark.parametrize(
    ("tag", "kind"), [("1cpu.torch2.97.1", "cpu"), ("1cu126.torch2.97.1", "cu12"), ("1cu130.torch2.99.0", "cu13")]
)
def test_the_name_of_a_wheel_says_which_kernels_it_has(tag, kind):
    assert kind_of(wheel(tag)) == kind


@pytest.mark.parametrize(
    "wheels",
    [
        [wheel("1cpu.torch2.97.1"), wheel("1cu130.torch2.99.0")],
        [wheel("1cu126.torch2.97.1"), wheel("1cu130.torch2.99.0")],
        [Path("amp_engine-0.1.0-py3-none-any.whl")],
    ],
)
def test_wheels_of_other_kernels_are_no_wheel(tmp_path, wheels):
    with pytest.raises(ValueError, match="AMP_ENGINE_BUILD"):
        merge(wheels, tmp_path, Path("python"))
    assert not list(tmp_path.iterdir())
