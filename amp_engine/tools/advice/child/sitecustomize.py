"""Starts a trial or an audit in the process of a script, then runs the sitecustomize that this one hides.

Python finds this file through PYTHONPATH when it starts, so the script runs as usual: its `__main__`, its arguments,
its tracebacks, and settings that it makes before it imports torch. This file imports neither torch nor amp_engine. It
seeds numpy and torch right after their import. The trial begins right after the import of amp_engine, which this file
imports after torch if the script has not done so. Processes that the script starts have no trial. An audit begins where
a trial does, and seeds nothing.
"""

import importlib
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any

VARIABLE = "AMP_ENGINE_TRIAL"
AUDIT_VARIABLE = "AMP_ENGINE_AUDIT"


class _AfterImport:
    """A finder on `sys.meta_path` that finds nothing by itself, but calls a function after the import of a module.

    A search for a spec, as by `importlib.util.find_spec`, does not count as an import. After an import that raises, the
    function waits for the next import.
    """

    def __init__(self, functions: dict[str, Callable[[], object]]) -> None:
        self._functions = functions
        self._looking: set[tuple[int, str]] = set()  # by thread: others may look for the same name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the spec with the other finders, and wrap its loader."""
        looking = (get_ident(), name)
        if name not in self._functions or looking in self._looking:  # a finder may ask all finders
            return None
        self._looking.add(looking)
        try:
            for finder in list(sys.meta_path):
                find_spec = getattr(finder, "find_spec", None)
                spec = None if finder is self or find_spec is None else find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, name, self._functions)
                    return spec
            return None
        finally:
            self._looking.discard(looking)


class _Loader:
    """Loads a module with another loader, then calls the module's function once."""

    def __init__(self, real: Any, name: str, functions: dict[str, Callable[[], object]]) -> None:
        self._real, self._name, self._functions = real, name, functions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._real.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._real  # type: ignore[union-attr]
        self._real.exec_module(module)
        function = self._functions.pop(self._name, None)
        if function is not None:
            function()


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    path = [entry for entry in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if entry and entry != here]
    if path:
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
    try:
        if VARIABLE in os.environ:
            task = json.loads(os.environ.pop(VARIABLE))
            seed = task["seed"]
            random.seed(seed)
            functions: dict[str, Callable[[], object]] = {
                "numpy": lambda: importlib.import_module("numpy.random").seed(seed),
                "torch": lambda: _after_torch(seed),
                "amp_engine": lambda: importlib.import_module("amp_engine.tools.advice.script_trial").begin(task),
            }
            sys.meta_path.insert(0, _AfterImport(functions))
        if AUDIT_VARIABLE in os.environ:
            told = json.loads(os.environ.pop(AUDIT_VARIABLE))
            functions = {
                "torch": _after_torch,
                "amp_engine": lambda: importlib.import_module("amp_engine.tools.advice.script_audit").begin(told),
            }
            sys.meta_path.insert(0, _AfterImport(functions))
    finally:
        hidden = PathFinder.find_spec("sitecustomize")
        if hidden is not None and hidden.loader is not None:
            module = module_from_spec(hidden)
            sys.modules[hidden.name] = module
            hidden.loader.exec_module(module)


def _after_torch(seed: int | None = None) -> None:
    if seed is not None:
        sys.modules["torch"].manual_seed(seed)
    if "amp_engine" in sys.modules:  # it is importing torch, and the trial or audit begins after it
        return
    root = str(Path(__file__).parents[4])
    sys.path.insert(0, root)  # the package may be in the command's directory only
    try:
        importlib.import_module("amp_engine")
    finally:
        sys.path.remove(root)


_start()
