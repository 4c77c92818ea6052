"""Installs amp_engine's finder in a child process, then runs the sitecustomize that this one hides.

Every Python that is started with this PYTHONPATH runs it, older versions too, so it needs nothing after Python 3.6.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType


def _load(spec: ModuleSpec) -> ModuleType:
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    try:
        if sys.version_info >= (3, 10):  # noqa: UP036
            finder = spec_from_file_location(
                "_amp_engine_apex_finder", os.path.join(os.path.dirname(here), "finder.py")
            )
            assert finder is not None
            _load(finder).start_child()
    finally:
        hidden = PathFinder.find_spec("sitecustomize")
        if hidden is not None and hidden.loader is not None:
            _load(hidden)


_start()
