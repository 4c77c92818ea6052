"""`import apex`: who answers, under which names, and how it ends."""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from textwrap import dedent

import pytest

import amp_engine
from amp_engine.apex import finder
from tests.apex.trees import REAL, amp_engine_tree, nvidia_apex, pyramid_apex, python, write

INSTALLED = "from amp_engine.apex import finder\nfinder.install()\n"


@pytest.fixture
def tree(tmp_path):
    return amp_engine_tree(tmp_path / "tree")


@pytest.fixture
def run(tree):
    """Run code that knows the tree's amp_engine."""

    def run(code, *path, **options):
        return python("-W", "error", "-c", dedent(code), path=[*path, tree], **options).stdout

    return run


@pytest.fixture
def installed():
    assert finder.install().serves == "all"
    yield
    finder.uninstall()


def parts_of_apex():
    for part in pkgutil.walk_packages([str(REAL)], "apex."):
        if part.name not in ("apex.__main__", "apex.install"):
            yield part.name


@pytest.mark.parametrize("name", ["apex", *parts_of_apex()])
def test_each_part_is_one_module_under_both_names(installed, name):
    real = importlib.import_module(f"amp_engine.{name}")
    packages = [m for n, m in sys.modules.items() if n.startswith("amp_engine.apex") and hasattr(m, "__path__")]
    before = [dict(vars(package)) for package in packages]
    assert importlib.import_module(name) is real
    assert sys.modules[name] is sys.modules[f"amp_engine.{name}"] is real
    assert real.__name__ == real.__spec__.name == f"amp_engine.{name}"
    for package, attributes in zip(packages, before, strict=True):
        assert {k: v for k, v in vars(package).items() if k in attributes} == attributes


def test_the_version_is_that_of_amp_engine(installed):
    assert importlib.metadata.version("apex") == f"0.1+amp.engine.{amp_engine.__version__}"


def test_looking_for_apex_imports_neither_it_nor_torch():
    code = """
        import importlib.metadata, importlib.util, sys
        spec = importlib.util.find_spec("apex")
        assert spec.name == "apex" and spec.origin.endswith("__init__.py") and spec.submodule_search_locations
        importlib.metadata.version("apex")
        assert not [name for name in sys.modules if name.split(".")[0] in ("apex", "torch", "amp_engine")]
    """
    python("-c", dedent(code), path=[REAL / "children"])


IMPORTS = {
    "import apex": "apex",
    "import apex.amp": "apex.amp",
    "import apex.amp as x": "x",
    "from apex import amp": "amp",
    "from apex import amp as x, parallel": "x",
    "import apex as x": "x.amp",
    "from apex.amp import *": "__import__('inspect').getmodule(initialize)",
    "import apex.amp.late": "apex.amp",
}


@pytest.mark.parametrize(("statement", "expression"), IMPORTS.items())
def test_each_form_of_import_gives_the_module_of_amp_engine(run, statement, expression):
    out = run(f"{INSTALLED}{statement}\nimport sys\nm = {expression}\nprint(m.__name__, sys.modules[m.__name__] is m)")
    assert out.split() == ["amp_engine." + ("apex" if expression == "apex" else "apex.amp"), "True"]


@pytest.mark.parametrize("statement", ["import apex", "import apex.amp._amp_state, apex.parallel.LARC"])
@pytest.mark.parametrize("first", ["pass", "import amp_engine.apex.amp, amp_engine.apex.parallel"])
def test_an_object_named_as_a_submodule_stays_the_object(run, first, statement):
    run(f"""
        {first}
        from amp_engine.apex import finder
        finder.install()
        {statement}
        from apex.amp._amp_state import _amp_state, State
        from apex.parallel.LARC import LARC
        import apex, apex.amp, apex.parallel, sys
        assert apex.amp._amp_state is _amp_state and isinstance(_amp_state, State) and apex.parallel.LARC is LARC
        assert sys.modules["apex.parallel.LARC"].LARC is LARC
        assert sys.loads == ["apex", "amp", "_amp_state"]
    """)


def test_the_extension_modules_are_served(run):
    out = run(f"{INSTALLED}import amp_C, apex_C, apex.amp_C\nprint(amp_C.name, apex_C.name, apex.amp_C is amp_C)")
    assert out.split() == ["amp_engine.apex.amp_C", "amp_engine.apex.apex_C", "True"]


@pytest.mark.parametrize("name", ["apex.contrib", "apex.amp.nothing", "amp_C.nothing"])
def test_an_unknown_name_is_an_ordinary_import_error(run, name):
    run(f"""
        from amp_engine.apex import finder
        finder.install()
        import importlib, importlib.util
        if {name!r} != "amp_C.nothing":
            assert importlib.util.find_spec({name!r}) is None
        try:
            importlib.import_module({name!r})
        except ModuleNotFoundError as error:
            assert error.name == {name!r} and str(error).startswith("No module named {name!r}"), error
        else:
            raise AssertionError
    """)


def test_an_error_inside_a_part_is_that_error(run):
    run("""
        from amp_engine.apex import finder
        finder.install()
        import sys
        for _ in range(2):
            try:
                import apex.broken
            except ModuleNotFoundError as error:
                assert error.name == "nowhere_to_be_found"
            else:
                raise AssertionError
        assert not [name for name in sys.modules if name.endswith("broken")]
    """)


def test_the_tools_of_python_work_on_either_name(run):
    run("""
        from amp_engine.apex import finder
        finder.install()
        import importlib, importlib.resources, inspect, pickle, pkgutil, sys
        import apex.amp
        assert "What the tests read." in inspect.getsource(apex.amp) and "State" in inspect.getsource(apex.amp.State)
        assert importlib.resources.files("apex.amp").joinpath("table.txt").read_text() == "a resource\\n"
        assert pkgutil.get_data("apex.amp", "table.txt") == b"a resource\\n"
        assert {"late", "_amp_state"} <= {part.name for part in pkgutil.iter_modules(apex.amp.__path__)}
        assert pkgutil.resolve_name("apex.amp:initialize") is apex.amp.initialize
        state = pickle.dumps(apex.amp.State(), protocol=0)
        assert b"camp_engine.apex.amp._amp_state" in state
        for name in (b"camp_engine.apex.amp._amp_state", b"capex.amp._amp_state"):
            assert type(pickle.loads(state.replace(b"camp_engine.apex.amp._amp_state", name))) is apex.amp.State
        before = apex.amp
        assert importlib.reload(apex.amp) is before is sys.modules["apex.amp"] is sys.modules["amp_engine.apex.amp"]
        assert sys.loads == ["apex", "amp", "_amp_state", "amp"]
    """)


def test_a_part_runs_as_a_program_and_is_read_without_an_import(tree):
    out = python("-m", "apex.parallel.multiproc", "a", path=[tree / "amp_engine/apex/children"]).stdout
    assert out.split() == ["__main__", "['a']"]
    code = """
        import importlib.util, sys
        loader = importlib.util.find_spec("apex").loader
        assert "__getattr__" in loader.get_source("apex") and loader.get_filename("apex").endswith("__init__.py")
        assert loader.is_package("apex") and "apex" not in sys.modules
    """
    python("-c", dedent(code), path=[tree / "amp_engine/apex/children"])


def test_threads_that_import_at_once_get_one_whole_module(run):
    run("""
        from amp_engine.apex import finder
        finder.install()
        import importlib, sys, threading
        sys.setswitchinterval(1e-6)
        names = ["apex", "apex.amp", "amp_engine.apex.amp", "apex.amp.late"] * 5
        start, got = threading.Barrier(len(names)), []
        def work(name):
            start.wait()
            exec(f"import {name} as m", scope := {})
            got.append((name, scope["m"]))
            from apex.amp import initialize
        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(got) == len(names)
        import amp_engine.apex.amp
        for name, module in got:
            if name in ("apex.amp", "amp_engine.apex.amp"):
                assert module is amp_engine.apex.amp
        assert sorted(sys.loads) == ["_amp_state", "amp", "apex", "late"]
        assert type(amp_engine.apex.amp._amp_state).__name__ == "State"
    """)


def test_the_metadata_of_apex_is_complete(run):
    run("""
        from amp_engine.apex import finder
        finder.install()
        from importlib import metadata
        assert metadata.version("apex") == metadata.version("Apex") == "0.1+amp.engine.7.8.9"
        assert metadata.metadata("apex")["Name"] == metadata.distribution("apex").name == "apex"
        assert metadata.requires("apex") == ["amp_engine"] and metadata.files("apex") is None
        assert list(metadata.distribution("apex").entry_points) == []
        known = metadata.packages_distributions()
        assert known["apex"] == known["amp_C"] == known["apex_C"] == ["apex"]
        assert [d.version for d in metadata.distributions() if d.name == "apex"] == ["0.1+amp.engine.7.8.9"]
        assert [d.version for d in metadata.distributions(name="pytest") if d.name == "apex"] == []
        finder.uninstall()
        try:
            metadata.version("apex")
        except metadata.PackageNotFoundError:
            pass
        else:
            raise AssertionError
    """)


def test_uninstall_leaves_what_install_found(run):
    run("""
        import os, sys
        from amp_engine.apex import finder
        os.environ["PYTHONPATH"] = before = "/somewhere" + os.pathsep + "/else"
        path, environment = list(sys.meta_path), dict(os.environ)
        finder.uninstall()
        for children in (False, True, False):
            assert finder.install(children=children) is finder.installed()
        assert len(sys.meta_path) == len(path) + 1 and os.environ["PYTHONPATH"].endswith(os.pathsep + before)
        import apex.amp.late, amp_C
        assert apex.amp.late.__name__ == "amp_engine.apex.amp.late"
        finder.uninstall()
        assert finder.installed() is None and sys.meta_path == path and dict(os.environ) == environment
        assert not [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C", "apex_C")]
        assert sys.modules["amp_engine.apex.amp"] is apex.amp
        try:
            import apex
        except ModuleNotFoundError as error:
            assert error.name == "apex"
        else:
            raise AssertionError
        del os.environ["PYTHONPATH"]
        finder.install(children=True)
        finder.uninstall()
        assert "PYTHONPATH" not in os.environ and finder.VARIABLE not in os.environ
    """)


def test_importing_the_module_install_installs(run):
    assert run("import amp_engine.apex.install\nimport apex\nprint(apex.__name__)") == "amp_engine.apex\n"


# Other things named apex


def test_an_apex_with_amp_is_left_alone(run, tmp_path):
    other = nvidia_apex(tmp_path / "site", amp=True)
    run(
        """
        import sys
        from amp_engine.apex import finder
        path = list(sys.meta_path)
        decision = finder.install(children=True)
        assert (decision.serves, decision.nvidia) == ("nothing", True) and decision.other in str(decision)
        assert "--replace" in str(decision) and sys.meta_path == path and finder.installed() is None
        import apex.amp, os
        assert apex.amp.origin == "NVIDIA" and "children" not in os.environ["PYTHONPATH"]
        """,
        other,
    )


@pytest.mark.parametrize("first", ["pass", "import apex.amp, apex.optimizers", "finder.install()"])
def test_replace_serves_in_place_of_an_apex_with_amp_and_gives_it_back(run, tmp_path, first):
    run(
        f"""
        from amp_engine.apex import finder
        from importlib import metadata
        import sys
        {first}
        before = {{name: module for name, module in sys.modules.items() if name.startswith("apex")}}
        assert finder.install(replace=True).serves == finder.install().serves == "all"
        import apex.amp
        assert apex.amp.__name__ == "amp_engine.apex.amp" and metadata.version("apex").startswith("0.1+")
        try:
            import apex.optimizers
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError("half an apex")
        finder.uninstall()
        assert {{name: module for name, module in sys.modules.items() if name.startswith("apex")}} == before
        import apex.amp
        assert apex.amp.origin == "NVIDIA" and metadata.version("apex") == "0.9"
        """,
        nvidia_apex(tmp_path / "site", amp=True),
    )


@pytest.mark.parametrize("first", ["pass", "import apex.optimizers"])
def test_an_apex_without_amp_is_given_what_it_lacks(run, tmp_path, first):
    other = nvidia_apex(tmp_path / "site", amp=False)
    (other / "apex/parallel/__pycache__").mkdir(parents=True)  # as an uninstall leaves it
    run(
        f"""
        {first}
        from importlib import metadata
        from amp_engine.apex import finder
        assert finder.install().serves == "missing"
        from apex import amp
        import apex.amp.late, apex.optimizers, apex.parallel.LARC, amp_C, sys
        assert apex.origin == apex.optimizers.origin == "NVIDIA" and metadata.version("apex") == "0.9"
        assert amp is sys.modules["amp_engine.apex.amp"] and amp_C.name == "amp_engine.apex.amp_C"
        assert apex.amp.late is sys.modules["amp_engine.apex.amp.late"] and sys.loads.count("late") == 1
        assert isinstance(apex.parallel.LARC, type)
        finder.uninstall()
        assert apex is sys.modules["apex"] and not hasattr(apex, "amp") and hasattr(apex, "optimizers")
        assert "apex.amp" not in sys.modules
        finder.install()
        assert finder.install(replace=True).serves == "all"
        import apex
        assert apex.__name__ == "amp_engine.apex"
        assert [type(entry) for entry in sys.meta_path].count(finder.ApexFinder) == 1
        """,
        other,
    )


@pytest.mark.parametrize("first", ["pass", "import apex"])
def test_a_clone_of_the_repository_beside_the_script_is_no_apex(run, tmp_path, first):
    clone = write(
        tmp_path / "work", {"apex/setup.py": "", "apex/apex/__init__.py": "", "apex/apex/amp/__init__.py": ""}
    )
    out = run(f"{first}\n{INSTALLED}import apex.amp\nprint(apex.__name__, finder.installed().serves)", clone)
    assert out.split() == ["amp_engine.apex", "all"]


@pytest.mark.parametrize("first", ["pass", "import apex"])
@pytest.mark.parametrize("make", [pyramid_apex, lambda root: write(root, {"apex.py": ""})], ids=["package", "file"])
def test_an_unrelated_apex_is_hidden_with_one_warning(run, tmp_path, make, first):
    run(
        f"""
        import warnings
        from amp_engine.apex import finder
        {first}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            finder.install()
            finder.install()
        assert len(caught) == 1 and caught[0].category is RuntimeWarning and "not NVIDIA" in str(caught[0].message)
        assert caught[0].filename == "<string>"
        import apex.amp
        assert apex.__name__ == "amp_engine.apex"
        """,
        make(tmp_path / "site"),
    )


def test_what_a_failed_import_left_behind_does_not_hide_ours(run, tmp_path):
    other = write(
        tmp_path / "site",
        {"apex/__init__.py": "from . import parallel, gone", "apex/parallel/__init__.py": "", "apex/views.py": ""},
    )
    run(
        """
        import sys
        try:
            import apex
        except ImportError:
            assert "apex.parallel" in sys.modules
        from amp_engine.apex import finder
        left = sys.modules["apex.parallel"]
        sys.path.remove(left.__path__[0].removesuffix("/apex/parallel"))
        assert finder.install().serves == "all"
        from apex.parallel import LARC
        finder.uninstall()
        assert sys.modules["apex.parallel"] is left
        """,
        other,
    )


def test_a_stand_in_with_amp_is_left_alone(run):
    run("""
        import sys, types
        sys.modules["apex"] = types.ModuleType("apex")
        sys.modules["apex"].amp = object()
        from amp_engine.apex import finder
        assert finder.install().serves == "nothing"
        assert finder.install(replace=True).serves == "all"
    """)


# Child processes

CHILD = "import apex, sys; print(apex.__name__, sys.path)"


def test_children_and_their_children_have_it_and_the_path_of_python(tree, tmp_path):
    code = f"""
        import subprocess, sys
        from amp_engine.apex import finder
        finder.install(children=True)
        grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
        subprocess.run([sys.executable, "-c", grandchild])
    """
    name, path = python("-c", dedent(code), path=[tree]).stdout.split(maxsplit=1)
    assert name == "amp_engine.apex"
    assert path == python("-c", "import sys; print(sys.path)", path=[tree]).stdout


def test_a_child_that_cannot_find_amp_engine_has_that_of_its_parent(tree, tmp_path):
    out = python(
        "-c", CHILD + "; import amp_engine; print(amp_engine.__version__)", path=[tree / "amp_engine/apex/children"]
    )
    assert out.stdout.startswith("amp_engine.apex")
    assert out.stdout.endswith("7.8.9\n")


def test_the_sitecustomize_of_the_user_still_runs(tree, tmp_path):
    mine = write(tmp_path / "mine", {"sitecustomize.py": "import sys\nsys.mine = __file__\n"})
    code = "import sys, apex, sitecustomize; print(sys.mine, sitecustomize.__file__, apex.__name__)"
    out = python("-c", code, path=[tree / "amp_engine/apex/children", mine]).stdout.split()
    assert out == [str(mine / "sitecustomize.py")] * 2 + ["amp_engine.apex"]


def test_a_child_decides_when_it_knows_its_path(tree, tmp_path):
    script = nvidia_apex(tmp_path / "work", amp=True)
    write(script, {"script.py": "import apex.amp\nprint(apex.amp.origin)\n"})
    children = [tree / "amp_engine/apex/children"]
    assert python(script / "script.py", path=children, check=False).stdout == "NVIDIA\n"
    replaced = python(script / "script.py", path=children, check=False, env={finder.VARIABLE: "replace"})
    assert "has no attribute 'origin'" in replaced.stderr


def test_replace_reaches_the_children(run, tmp_path):
    out = run(
        """
        import subprocess, sys
        from amp_engine.apex import finder
        finder.install(replace=True, children=True)
        subprocess.run([sys.executable, "-c", "import apex; print(apex.__name__)"])
        """,
        nvidia_apex(tmp_path / "site", amp=True),
    )
    assert out == "amp_engine.apex\n"
