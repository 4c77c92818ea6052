"""Packages written for one test: an amp_engine whose apex imports no torch, and things that are named apex."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

REAL = Path(__file__).parents[2] / "amp_engine" / "apex"

# As in apex, `apex.amp._amp_state` is an object and `apex.parallel.LARC` a class, both named as submodules.
TREE = {
    "amp_engine/__init__.py": '__version__ = "7.8.9"\n',
    "amp_engine/apex/__init__.py": """
        import importlib, sys
        sys.loads = getattr(sys, "loads", []) + ["apex"]
        def __getattr__(name):
            if name in ("amp", "parallel"):
                return importlib.import_module(f"{__name__}.{name}")
            raise AttributeError(name)
    """,
    "amp_engine/tools/apex_check/check.py": """
        def main(paths):
            print("checked", paths)
            return 5
    """,
    "amp_engine/apex/amp/__init__.py": """
        import sys, time
        time.sleep(0.05)  # threads that import it meet here
        sys.loads.append("amp")
        from amp_engine.apex.amp._amp_state import State, _amp_state
        __all__ = ["initialize"]
        def initialize(): "What the tests read."
    """,
    "amp_engine/apex/amp/_amp_state.py": """
        import sys
        sys.loads.append("_amp_state")
        class State: pass
        _amp_state = State()
    """,
    "amp_engine/apex/amp/late.py": "import sys\nsys.loads.append('late')\n",
    "amp_engine/apex/amp/table.txt": "a resource",
    "amp_engine/apex/parallel/__init__.py": "from amp_engine.apex.parallel.LARC import LARC\n",
    "amp_engine/apex/parallel/LARC.py": "class LARC: pass\n",
    "amp_engine/apex/parallel/multiproc.py": "import sys\nprint(__name__, sys.argv[1:])\n",
    "amp_engine/apex/broken.py": "import nowhere_to_be_found\n",
    "amp_engine/apex/amp_C.py": "name = __name__\n",
    "amp_engine/apex/apex_C.py": "name = __name__\n",
}


def write(root, files):
    """Write `{path: text}` below `root`; texts may be indented alike. Returns `root`."""
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").split("\n")
        margin = len(lines[0]) - len(lines[0].lstrip())
        file.write_text("\n".join(line[margin:] for line in lines) + "\n")
    return root


def amp_engine_tree(root):
    """An amp_engine of a few lines with the real finder, runner and sitecustomize."""
    write(root, TREE)
    for path in ("finder.py", "install.py", "__main__.py", "children/sitecustomize.py"):
        (root / "amp_engine/apex" / path).parent.mkdir(exist_ok=True)
        shutil.copy(REAL / path, root / "amp_engine/apex" / path)
    return root


def nvidia_apex(root, *, amp):
    """An apex of NVIDIA's as an install leaves it, with amp or (since 2025) without."""
    parts = ["optimizers", *(["amp"] if amp else [])]
    return write(
        root,
        {
            "apex/__init__.py": "origin = 'NVIDIA'\n",
            **{f"apex/{part}/__init__.py": "origin = 'NVIDIA'\n" for part in parts},
            "apex-0.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.9\n",
        },
    )


def pyramid_apex(root):
    """PyPI's apex, which has the name and nothing else of NVIDIA's."""
    return write(root, {"apex/__init__.py": "", "apex/views.py": ""})


# Of the one who runs the tests, and no part of what is tested.
OWN = ("PYTHONPATH", "PYTHONUNBUFFERED", "AMP_ENGINE_APEX")


def python(*arguments, path=(), cwd=os.sep, check=True, **options):
    """Run an interpreter with `path` as its PYTHONPATH, not here, where `-c` would find the real amp_engine."""
    environment = {k: v for k, v in os.environ.items() if k not in OWN}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment | options.pop("env", {}),
        cwd=cwd,
        text=True,
        capture_output=True,
        **options,
    )
    assert not check or done.returncode == 0, done.stderr
    return done
