"""An import finder that gives `amp_engine.apex` the names of apex, so that it answers to `import apex`.

With it, `apex.X` is the module object `amp_engine.apex.X`, in `sys.modules` under both names, and `amp_C` and `apex_C`
are `amp_engine.apex.amp_C` and `.apex_C`; `importlib.metadata` finds a distribution named apex. An installed NVIDIA
apex that has amp is left alone; an NVIDIA apex without amp gets the parts that it lacks.

This file loads alone and imports only the standard library: child processes install the finder at their start (see
children/sitecustomize.py), and only an import of apex may import torch.
"""

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, MutableMapping
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import Any, NamedTuple

_PACKAGE = "amp_engine.apex"
_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_DIRECTORY))
_CHILDREN = os.path.join(_DIRECTORY, "children")

_TOP_LEVEL = ("apex", "amp_C", "apex_C")
# A package named apex that has one of these parts is NVIDIA's. The apex of PyPI is a toolkit for Pyramid.
_NVIDIA = ("amp", "contrib", "multi_tensor_apply", "normalization", "optimizers", "parallel", "transformer")

# An environment variable for child processes: "replace" and "once" (not for their own children), in any order.
VARIABLE = "AMP_ENGINE_APEX"


class Decision(NamedTuple):
    """Says which package answers to `import apex`, and why.

    Attributes:
        serves: "all" (apex, amp_C and apex_C are amp_engine's), "missing" (parts that the installed apex lacks) or
            "nothing".
        reason: a sentence on the other apex that was found, or on its absence.
        other: the path of the other apex, None without one.
        nvidia: true if the other apex is NVIDIA's.
    """

    serves: str
    reason: str
    other: str | None = None
    nvidia: bool = False

    @property
    def hides_unrelated(self) -> bool:
        """True if a package or module that only shares the name cannot be imported any more."""
        return self.serves == "all" and self.other is not None and not self.nvidia

    def __str__(self) -> str:
        who = {
            "all": f"`import apex` is {_PACKAGE} ({_DIRECTORY})",
            "missing": f"`import apex` is the apex at {self.other}; what it lacks is {_PACKAGE} ({_DIRECTORY})",
            "nothing": f"`import apex` is the apex at {self.other}",
        }
        return f"{who[self.serves]}: {self.reason}"


def decide(*, replace: bool = False) -> Decision:
    """Return the decision that `install(replace=replace)` would make; changes and imports nothing."""
    loaded = sys.modules.get("apex")
    if loaded is not None and not _is_ours(loaded):
        where, locations = getattr(loaded, "__file__", None), list(getattr(loaded, "__path__", ()))
    else:
        loaded, spec = None, _find_elsewhere("apex")
        if spec is None:
            return Decision("all", "no other apex is installed")
        where, locations = spec.origin if spec.has_location else None, list(spec.submodule_search_locations or ())
    if where is None and locations:
        return Decision("all", f"{locations[0]} is a directory without __init__.py, no installed apex")

    def has(part: str) -> bool:
        spec = PathFinder.find_spec(f"apex.{part}", locations)
        return (spec is not None and spec.loader is not None) or hasattr(loaded, part)

    where = locations[0] if locations else where or repr(loaded)
    if not any(map(has, _NVIDIA)):
        return Decision("all", f"the one at {where} is not NVIDIA's apex and is hidden", where)
    if replace:
        return Decision("all", f"it replaces NVIDIA's apex at {where}", where, nvidia=True)
    if has("amp"):
        return Decision("nothing", "it is NVIDIA's and has amp; replace it by replace=True or --replace", where, True)
    return Decision("missing", "it is NVIDIA's and has no amp", where, True)


def install(*, replace: bool = False, children: bool = False) -> Decision:
    """Let `import apex` find `amp_engine.apex`.

    If a finder is already installed, arguments that are True in either call apply.

    Args:
        replace: also replace an NVIDIA apex that has amp.
        children: install in child processes too (multiprocessing, subprocesses, workers of torchrun), through
            PYTHONPATH. Python's -E, -I and -S keep it out of a child.

    Returns:
        The decision, which `installed()` returns later. If it serves nothing, nothing was changed.

    Warns:
        AmpRuntimeWarning: an unrelated package or module named apex is hidden.
    """
    finder = _installed()
    if finder is None or (replace and finder.decision.serves != "all"):
        children = children or (finder is not None and finder.children)
        finder = ApexFinder(replace)
        if finder.decision.serves == "nothing":
            return finder.decision
        uninstall()
        finder.start()
        if finder.decision.hides_unrelated:
            # Does not import amp_engine: the class is used only if it is already imported.
            category = getattr(sys.modules.get("amp_engine.errors"), "AmpRuntimeWarning", RuntimeWarning)
            warnings.warn(f"{finder.decision}.", category, stacklevel=2)
    finder.replace |= replace
    if children:
        finder.children = True
        add_children(os.environ, replace=finder.replace)
    return finder.decision


def uninstall() -> None:
    """Undo `install`: remove the finder and the modules under apex's names, and restore PYTHONPATH."""
    finder = _installed()
    if finder is not None:
        finder.stop()


def installed() -> Decision | None:
    """Return the decision of the installed finder, None without one."""
    finder = _installed()
    return None if finder is None else finder.decision


def add_children(environment: MutableMapping[str, str], *, replace: bool = False, once: bool = False) -> None:
    """Make an environment install the finder in processes started with it, and in their children unless `once`."""
    remove_children(environment)
    words = [word for word, wanted in (("replace", replace), ("once", once)) if wanted]
    if words:
        environment[VARIABLE] = " ".join(words)
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([_CHILDREN, path] if path else [_CHILDREN])


def remove_children(environment: MutableMapping[str, str]) -> None:
    """Undo `add_children`."""
    environment.pop(VARIABLE, None)
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    if _CHILDREN in path:
        rest = os.pathsep.join(entry for entry in path if entry != _CHILDREN)
        if rest:
            environment["PYTHONPATH"] = rest
        else:
            del environment["PYTHONPATH"]


def start_child() -> None:
    """Install in a process that was started with `add_children`'s environment.

    The decision is made at the first import of apex: when this runs, `sys.path` still lacks the script's directory.
    """
    words = os.environ.get(VARIABLE, "").split()
    if "once" in words:
        remove_children(os.environ)
    if _installed() is None:
        finder = ApexFinder("replace" in words)
        finder.children = "once" not in words
        finder.start()


class ApexFinder:
    """The finder, first on `sys.meta_path`. If it serves only missing parts, it first asks the other finders."""

    def __init__(self, replace: bool) -> None:
        self.replace = replace
        self.children = False
        self._decision: Decision | None = None
        self._put_aside: dict[str, ModuleType] = {}

    @property
    def decision(self) -> Decision:
        """The decision, made when it is first asked for."""
        if self._decision is None:
            self._decision = decide(replace=self.replace)
        return self._decision

    def start(self) -> None:
        """Enter `sys.meta_path`."""
        sys.meta_path.insert(0, self)
        # An `import apex` that failed halfway leaves submodules in sys.modules, where they would hide ours.
        others = {name: module for name, module in _apex_modules().items() if not _is_ours(module)}
        if others and self.decision.serves == "all":
            self._put_aside = others
            for name in others:
                del sys.modules[name]

    def stop(self) -> None:
        """Restore `sys.meta_path`, `sys.modules` and the environment to their state before `start`."""
        sys.meta_path.remove(self)
        ours = {name: module for name, module in _apex_modules().items() if _is_ours(module)}
        for name, module in ours.items():
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            above = sys.modules.get(parent)  # NVIDIA's apex, if this finder gave it parts
            if above is not None and not _is_ours(above) and vars(above).get(child) is module:
                del vars(above)[child]
        for name, module in self._put_aside.items():
            sys.modules.setdefault(name, module)
        if self.children:
            remove_children(os.environ)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the spec of a module under apex's name; importlib calls it. Imports nothing."""
        if name == "amp_engine":  # a child process gets this finder's amp_engine, even if its sys.path lacks it
            return PathFinder.find_spec(name, [_ROOT])
        real = _real_name(name)
        if real is None or self.decision.serves == "nothing":
            return None
        if self.decision.serves == "missing" and (name == "apex" or self._others_have(name, path)):
            return None
        spec = PathFinder.find_spec(real, [os.path.join(_ROOT, *real.split(".")[:-1])])
        if spec is None or spec.loader is None:
            return None
        # No subclass of importlib.abc.Loader: importing that takes longer than everything else that a child needs.
        loader: Any = _Alias(spec)
        alias = ModuleSpec(name, loader, origin=spec.origin)
        alias.has_location = spec.has_location
        alias.submodule_search_locations = spec.submodule_search_locations
        return alias

    def _others_have(self, name: str, path: Any) -> bool:
        # Below a package of ours, the other finders find our files and would load them a second time.
        parent = name.rpartition(".")[0]
        return not (parent and _is_ours(sys.modules.get(parent))) and _find_elsewhere(name, path) is not None

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """Yield a distribution named apex, unless NVIDIA's has its own; importlib.metadata calls it."""
        asked = getattr(context, "name", None)
        if (asked is None or asked.lower() == "apex") and self.decision.serves == "all":
            yield _distribution()


class _Alias:
    """Loads a module of ours under apex's name for it: one object under both names."""

    def __init__(self, real: ModuleSpec) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Returns the real module, not a placeholder that exec_module replaces in sys.modules: a thread that waits for
        # this import could get the placeholder (import_ensure_initialized in CPython's import.c keeps the object that
        # it found before it waited).
        module = importlib.import_module(self._real.name)
        self._own_spec = module.__spec__
        # Importing a submodule under apex's name would bind it as an attribute of its package, but some of these
        # attributes are bound to other objects: `apex.amp._amp_state` to the state, `apex.parallel.LARC` to the class.
        # So imported submodules get their aliases here, before importlib shows the package to other threads.
        for real in [name for name in list(sys.modules) if name.startswith(f"{self._real.name}.")]:
            alias = f"apex{real.removeprefix(_PACKAGE)}"
            if alias not in sys.modules:
                sys.modules[alias] = importlib.import_module(real)  # waits for a thread that is importing it
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # importlib has set the alias's spec

    # For `python -m apex.parallel.multiproc`, and for tools that read sources without importing.

    def get_code(self, name: str) -> CodeType | None:
        return self._inspect("get_code")

    def get_source(self, name: str) -> str | None:
        return self._inspect("get_source")

    def get_filename(self, name: str) -> str:
        return self._inspect("get_filename")

    def is_package(self, name: str) -> bool:
        return self._inspect("is_package")

    def _inspect(self, method: str) -> Any:
        return getattr(self._real.loader, method)(self._real.name)


def _installed() -> Any:
    # Found by the name of its class, since a child process loads this file a first time under another module name.
    return next((finder for finder in sys.meta_path if _is_apex_finder(finder)), None)


def _is_apex_finder(finder: object) -> bool:
    return type(finder).__name__ == ApexFinder.__name__


def _is_ours(module: object) -> bool:
    name = getattr(getattr(module, "__spec__", None), "name", "")
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")


def _apex_modules() -> dict[str, ModuleType]:
    return {name: sys.modules[name] for name in list(sys.modules) if name.split(".")[0] in _TOP_LEVEL}


def _real_name(name: str) -> str | None:
    """`apex.amp` -> `amp_engine.apex.amp`, `amp_C` -> `amp_engine.apex.amp_C`, `numpy` -> None."""
    top, _, rest = name.partition(".")
    if top not in _TOP_LEVEL:
        return None
    return ".".join(filter(None, (_PACKAGE, "" if top == "apex" else top, rest)))


def _find_elsewhere(name: str, path: Any = None) -> ModuleSpec | None:
    """Return the other finders' spec; None for a submodule that is only a directory without __init__.py."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is not None and not _is_apex_finder(finder):
            spec = find_spec(name, path)
            if spec is not None and (name == "apex" or spec.loader is not None):
                return spec
    return None


def _version() -> str:
    """Return amp_engine's version, read from its source, as a local version of apex's last version."""
    import re  # only a caller who asks for the version pays for it

    spec = PathFinder.find_spec("amp_engine", [_ROOT])
    source = spec.loader.get_source("amp_engine") if spec is not None else ""  # type: ignore[union-attr]
    found = re.search(r'^__version__ = "(.+)"', source or "", re.MULTILINE)
    return f"0.1+amp.engine.{found.group(1).replace('+', '.')}" if found else "0.1+amp.engine"


def _distribution() -> Any:
    from importlib.metadata import Distribution  # a caller who asks for distributions has imported it

    class ApexDistribution(Distribution):
        def read_text(self, filename: str) -> str | None:
            return {
                "METADATA": f"Metadata-Version: 2.1\nName: apex\nVersion: {_version()}\n"
                "Summary: amp_engine.apex, which answers as apex\nRequires-Dist: amp_engine\n",
                "top_level.txt": "\n".join(_TOP_LEVEL),
                "INSTALLER": "amp_engine",
            }.get(filename)

        def locate_file(self, path: Any) -> Any:
            return os.path.join(_ROOT, path)

    return ApexDistribution()
