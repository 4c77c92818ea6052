"""setup.py builds or refuses, and the package says which, without compiling anything."""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from amp_engine.kernels import _native
from amp_engine.kernels.sources import digest

ROOT = Path(__file__).parent.parent
TOOLKIT = ("/usr/local/cuda", "13.0")


def load(name):
    spec = importlib.util.spec_from_file_location(f"amp_engine_{name}", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


toolchain = load("toolchain")


def fake_torch(cuda=None):
    return SimpleNamespace(__version__="2.99.0", version=SimpleNamespace(cuda=cuda))


def plan(forced="", torch=None, compiler="c++", toolkit=None):
    toolkit = toolkit and toolchain.Toolkit(*toolkit)
    return toolchain.plan(forced, *toolchain.best_mode(torch, compiler, toolkit))


def executable(path, text="#!/bin/sh\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def cuda_home(folder, version):
    executable(folder / "bin/nvcc", f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    (folder / "include").mkdir()
    (folder / "include/cuda_runtime_api.h").touch()
    return folder


# What is planned


def test_all_there_is_cuda_then_cpu_then_nothing():
    assert plan(torch=fake_torch("13.0"), toolkit=TOOLKIT) == (["cuda", "cpu", "none"], None)


def test_another_major_version_of_cuda_is_named_and_not_built():
    modes, why = plan(torch=fake_torch("12.8"), toolkit=TOOLKIT)
    assert modes == ["cpu", "none"]
    assert "nvcc is of CUDA 13.0 and torch of CUDA 12.8" in why
    assert "install the CUDA toolkit 12.8" in why


@pytest.mark.parametrize(
    ("there", "modes", "why"),
    [
        (
            {"torch": fake_torch(), "toolkit": TOOLKIT},
            ["cpu", "none"],
            "torch 2.99.0 is built without CUDA: install one",
        ),
        ({"torch": fake_torch("13.0")}, ["cpu", "none"], "no nvcc was found: install the CUDA toolkit 13.0"),
        ({"torch": fake_torch("13.0"), "compiler": None}, ["none"], "no C++ compiler was found: install g++"),
        ({"torch": None}, ["none"], "the build saw no torch: it has to be installed before"),
    ],
)
def test_what_is_missing_is_named_and_never_an_error(there, modes, why):
    planned, reason = plan(**there)
    assert planned == modes
    assert reason.startswith(why)


@pytest.mark.parametrize("mode", ["none", "cpu", "cuda"])
def test_forced_is_that_and_nothing_else(mode):
    modes, why = plan(mode, torch=fake_torch("13.0"), toolkit=TOOLKIT)
    assert modes == [mode]
    assert why == (None if mode == "cuda" else f"AMP_ENGINE_BUILD was {mode}: unset it")


def test_switched_off_is_the_reason_also_where_nothing_could_be_built():
    modes, why = plan("none", torch=fake_torch(), compiler=None)
    assert modes == ["none"]
    assert why.startswith("AMP_ENGINE_BUILD was none: unset it; besides, no C++ compiler was found")


@pytest.mark.parametrize(
    ("forced", "there", "remedy"),
    [
        ("cuda", {"torch": fake_torch()}, "install one that is built with it"),
        ("cuda", {"torch": fake_torch("13.0")}, "install the CUDA toolkit 13.0"),
        ("cuda", {"torch": fake_torch("12.8"), "toolkit": TOOLKIT}, "install the CUDA toolkit 12.8"),
        ("cpu", {"torch": fake_torch(), "compiler": None}, r"install g\+\+, or set CXX"),
        ("cpu", {"torch": None}, "the build saw no torch: it has to be installed before"),
    ],
)
def test_forced_and_impossible_says_what_to_install(forced, there, remedy):
    with pytest.raises(SystemExit, match=f"^AMP_ENGINE_BUILD={forced} is impossible: .*{remedy}"):
        plan(forced, **there)


def test_any_other_value_is_refused_with_the_allowed_ones():
    with pytest.raises(SystemExit, match="AMP_ENGINE_BUILD is 'rocm'; allowed are none, cpu, cuda"):
        plan("rocm", torch=fake_torch())


# What is found


def test_compiler_is_the_one_of_CXX(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert toolchain.find_compiler() is None
    executable(tmp_path / "clang++")
    monkeypatch.setenv("CXX", "clang++ -m64")
    assert toolchain.find_compiler() == str(tmp_path / "clang++")


def test_toolkit_is_the_one_of_CUDA_HOME(monkeypatch, tmp_path):
    home = cuda_home(tmp_path / "toolkit", "12.9")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert toolchain.find_toolkit() == (str(home), "12.9")


def test_nvcc_on_the_path_is_followed_to_its_toolkit(monkeypatch, tmp_path):
    home = cuda_home(tmp_path / "toolkit", "12.9")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").symlink_to(home / "bin/nvcc")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert toolchain.find_toolkit() == (str(home), "12.9")


def test_an_isolated_build_finds_the_torch_of_its_environment(monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / "torch").exists()])
    importlib.invalidate_caches()
    assert toolchain.find_torch() is torch


# What the build does


@pytest.fixture
def build(monkeypatch, tmp_path):
    """Runs setup.py's build_ext over the modes; those in `failing` do not compile. Gives the package that is left."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(sys, "path", list(sys.path))
    setup = load("setup")
    monkeypatch.setattr(setup, "extension", lambda mode: setuptools.Extension(setup.NAME, []))

    def run(modes, failing=(), why=None):
        attempts = iter(modes)

        def compiled(command):
            mode = next(attempts)
            if mode in failing:
                raise RuntimeError("exit 1")
            path = Path(command.build_lib, command.get_ext_filename(setup.NAME))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(mode)

        monkeypatch.setattr(setup.build_ext, "run", compiled)
        command = setup.build_command(None, None, modes, why)
        distribution = setuptools.Distribution({"name": "x", "ext_modules": [setuptools.Extension(setup.NAME, [])]})
        command = command(distribution)
        command.build_lib = str(tmp_path)
        command.ensure_finalized()
        command.run()
        return tmp_path / "amp_engine"

    return run


def record_in(package):
    return _native.read_record(_native.find(package, torch.__version__))


def test_a_failed_build_falls_back_and_leaves_the_reason(build):
    package = build(["cuda", "cpu", "none"], failing=["cuda"])
    assert record_in(package)["mode"] == "cpu"
    assert record_in(package)["reason"].startswith("the build for cuda failed, exit 1")
    assert record_in(package)["sources"] == digest(ROOT / "csrc")
    assert list(package.glob("*.so"))


def test_when_nothing_builds_nothing_stale_is_left(build):
    build(["cpu"])
    package = build(["cpu", "none"], failing=["cpu"])
    assert record_in(package)["mode"] == "none"
    assert not list(package.glob("*.so"))


def test_a_forced_build_that_fails_is_an_error(build):
    with pytest.raises(RuntimeError, match="exit 1"):
        build(["cpu"], failing=["cpu"])


@pytest.mark.parametrize(
    ("mode", "cuda", "tag"),
    [("none", None, ""), ("cpu", None, "1cpu.torch2.99.0"), ("cuda", "13.0", "1cu130.torch2.99.0")],
)
def test_a_wheel_says_in_its_name_which_kernels_it_has(monkeypatch, mode, cuda, tag):
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(sys, "path", list(sys.path))
    setup = load("setup")
    torch = SimpleNamespace(__version__="2.99.0+cpu", version=SimpleNamespace(cuda=cuda))
    assert setup.build_tag(mode, torch) == tag
    distribution = setuptools.Distribution(
        {"name": "x", "version": "1", "ext_modules": [setuptools.Extension(setup.NAME, [])]}
    )
    command = setup.NamedWheel(distribution)
    command.finalize_options()
    before = command.get_tag()
    assert (before[0], command.wheel_dist_name) == (f"cp{sys.version_info[0]}{sys.version_info[1]}", "x-1")
    distribution.kernels = tag
    assert command.get_tag() == (before if tag else ("py3", "none", "any"))
    assert command.wheel_dist_name == ("x-1-" + tag).rstrip("-")


def test_the_cpu_build_has_no_cuda_source(monkeypatch):
    pytest.importorskip("setuptools")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    setup = load("setup")
    monkeypatch.setattr(importlib.import_module("torch.utils.cpp_extension"), "CUDA_HOME", "/usr/local/cuda")
    cpu = setup.extension("cpu")
    assert "csrc/bindings.cpp" in cpu.sources
    assert cpu.sources == sorted(cpu.sources)
    assert not [source for source in cpu.sources if "cuda" in source]
    cuda = setup.extension("cuda")
    assert set(cuda.sources) > set(cpu.sources)
    assert len({Path(source).with_suffix(".o") for source in cuda.sources}) == len(cuda.sources)


# What the package says


def test_switched_off_at_run_time(monkeypatch):
    monkeypatch.setenv("AMP_ENGINE_BUILD", "none")
    assert _native.load(_native.EXTENSION, _native.record) == (
        None,
        "AMP_ENGINE_BUILD=none turns the compiled kernels off; unset it",
    )


@pytest.fixture
def switched_on(monkeypatch):
    monkeypatch.delenv("AMP_ENGINE_BUILD", raising=False)


@pytest.mark.usefixtures("switched_on")
def test_kernels_of_other_sources_than_the_clone_has_are_refused(monkeypatch):
    record = {"mode": "cpu", "torch": torch.__version__, "sources": digest(ROOT / "csrc"), "reason": None}
    extension = SimpleNamespace(build_info=lambda: {"torch": torch.__version__})
    monkeypatch.setattr(_native, "import_from", lambda path: extension)
    assert _native.load(Path(__file__), record) == (extension, None)
    with pytest.warns(RuntimeWarning, match="as after a git pull; run: pip install --no-deps --editable"):
        module, _ = _native.load(Path(__file__), {**record, "sources": "of before"})
    assert module is None
    monkeypatch.setattr(_native, "IS_CLONE", False)  # as installed, without csrc
    assert _native.load(Path(__file__), {**record, "sources": "of before"}) == (extension, None)


def test_the_digest_tells_of_each_change_of_the_sources(tmp_path):
    (tmp_path / "cpu").mkdir()
    source = tmp_path / "cpu" / "a.cpp"
    source.write_text("int a;")
    first = digest(tmp_path)
    (tmp_path / "notes.md").write_text("no source")
    assert digest(tmp_path) == first
    source.write_text("int b;")
    assert digest(tmp_path) != first
    source.write_text("int a;")
    source.rename(tmp_path / "b.cpp")
    assert digest(tmp_path) != first


def test_the_command_that_compiles_is_of_pip_or_else_of_uv():
    assert _native.install(is_clone=True, has_pip=True) == f"pip install --no-deps --editable {ROOT}"
    assert _native.install(is_clone=False, has_pip=False) == (
        "uv pip install setuptools ninja && uv pip install --no-build-isolation --no-deps --force-reinstall . "
        "(in the clone of amp_engine)"
    )


@pytest.mark.usefixtures("switched_on")
def test_nothing_built_says_why():
    module, reason = _native.load(
        _native.EXTENSION, {"mode": "none", "torch": None, "reason": "no C++ compiler was found: install g++"}
    )
    assert module is None
    assert reason == f"no C++ compiler was found: install g++; run: {_native.INSTALL}"


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            ImportError("_C.so: undefined symbol: _ZN3c10"),
            "compiled against torch another version, _C.so: undefined symbol",
        ),
        (OSError("libcudart.so.13: cannot open"), "libcudart.so.13: cannot open"),
        (RuntimeError("already registered"), "already registered"),
    ],
)
def test_an_extension_that_does_not_load_never_raises(monkeypatch, error, told):
    def fail(path):
        raise error

    monkeypatch.setattr(_native, "import_from", fail)
    with pytest.warns(RuntimeWarning) if "another version" in told else nullcontext():
        module, reason = _native.load(Path(__file__), {"mode": "cpu", "torch": torch.__version__, "reason": None})
    assert module is None
    assert told in reason
    assert reason.endswith(f"run: {_native.INSTALL}")


@pytest.mark.usefixtures("switched_on")
def test_what_is_no_extension_is_refused(tmp_path):
    file = tmp_path / "_C.so"
    assert _native.load(file, {}) == (None, f"nothing was compiled for this Python; run: {_native.INSTALL}")
    file.write_text("no library")
    module, reason = _native.load(file, {})
    assert module is None
    assert "_C.so: " in reason


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("record", [{}, {"mode": "cpu", "torch": torch.__version__, "reason": None}])
def test_an_extension_that_loads_on_a_torch_that_is_not_its_own_is_refused(monkeypatch, record):
    extension = SimpleNamespace(build_info=lambda: {"torch": "1.2.3"})
    monkeypatch.setattr(_native, "import_from", lambda path: extension)
    with pytest.warns(RuntimeWarning, match="does not use its compiled kernels: "):
        module, reason = _native.load(Path(__file__), record)
    assert module is None
    assert f"against torch 1.2.3, and torch {torch.__version__} is installed" in reason


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_broken_record_is_no_record(tmp_path, text):
    (tmp_path / "_C.json").write_text(text)
    assert _native.read_record(tmp_path / "_C.so") == {}


@pytest.mark.skipif(os.environ.get("AMP_ENGINE_BUILD") not in ("cpu", "cuda"), reason="nothing is forced")
def test_what_is_forced_is_loaded():
    assert _native.module is not None, _native.reason
    assert _native.record["mode"] == os.environ["AMP_ENGINE_BUILD"]
    assert (_native.module.build_info()["cuda"] is not None) == (os.environ["AMP_ENGINE_BUILD"] == "cuda")


@pytest.mark.usefixtures("switched_on")
def test_a_clone_that_hides_an_installation_with_kernels_says_so(tmp_path, monkeypatch):
    installed = tmp_path / "amp_engine" / "_C.so"
    installed.parent.mkdir()
    installed.touch()
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    _, reason = _native.load(tmp_path / "clone" / "_C.so", {})
    assert f"which Python looks into before {tmp_path}, where amp_engine has kernels: leave that folder, or" in reason


def test_the_workflow_runs_each_part_of_ci():
    parts = re.search(r"set -- (.*)", (ROOT / ".ci/run").read_text())[1].split()
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    listed = re.search(r"part: \[(.*)\]", workflow)[1].split(", ") + re.findall(r"run: \.ci/run (\w+)", workflow)
    assert sorted(listed) == sorted(parts)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("arguments", "extras"),
    [
        ("tests/test_cases.py", set()),
        ("tests/test_demo.py::test_x -k y", {"demo"}),
        ("tests/zoo/test_sample.py", {"zoo"}),
        ("tests/tools", {"demo", "zoo"}),
        ("", {"demo", "zoo"}),
    ],
)
def test_make_installs_for_one_file_of_tests_only_what_it_needs(arguments, extras):
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    command = ["make", "--always-make", "--dry-run", "test", f"ARGS={arguments}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert set(re.findall(r"amp_engine\[(\w+)\]", done.stdout)) == extras
    assert '--editable ".[test]"' in done.stdout


def test_a_package_index_is_given_no_link_that_leads_nowhere(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = load("setup").index_page()
    assert "](docs/" not in page
    assert "demo.png" not in page
    assert "docs/half_models.md: " in page
    assert "pip install" in page
