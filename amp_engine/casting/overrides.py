"""Changes to the lists for one run, from the environment: `AMP_ENGINE_FLOAT="+torch.foo,-torch.nn.functional.bar"`."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional

from amp_engine.casting.lists import FUNCTIONAL, LINALG, TENSOR, TORCH, CastLists
from amp_engine.casting.patches import is_patchable
from amp_engine.casting.registration import Registration
from amp_engine.errors import AmpValueError

VARIABLES = {"half": "AMP_ENGINE_HALF", "float": "AMP_ENGINE_FLOAT", "promote": "AMP_ENGINE_PROMOTE"}

_LISTS = {id(torch): TORCH, id(torch.nn.functional): FUNCTIONAL, id(torch.linalg): LINALG, id(torch.Tensor): TENSOR}
_EXAMPLE = "torch.nn.functional.gelu, torch.Tensor.softmax or package.module.function"


@dataclass(frozen=True)
class _Entry:
    kind: str
    text: str
    owner: Any
    name: str

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def error(self, complaint: str) -> AmpValueError:
        return _error(self.kind, self.text, complaint)


def from_environment(
    environment: Mapping[str, str], registrations: Sequence[Registration] = ()
) -> tuple[list[Registration], list[tuple[Any, str]]]:
    """Read the three variables. `+name` puts a function on the list of a variable, `-name` takes it off.

    Args:
        environment: for example os.environ.
        registrations: the program's registrations; the environment wins over them.

    Returns:
        The functions to cast, where the first registration of a function counts; owner and name of those not to cast.

    Imports the modules that the names begin with. Raises AmpValueError, which names variable and entry, if an entry has
    no sign, or its function does not exist, cannot be replaced, is added twice, or is taken off a list that it is not
    on.
    """
    added: dict[tuple[int, str], _Entry] = {}
    removed: dict[tuple[int, str], _Entry] = {}
    for kind, variable in VARIABLES.items():
        for text in filter(None, (part.strip() for part in environment.get(variable, "").split(","))):
            entry = _parsed(kind, text)
            if text[0] == "+":
                _check_added(entry, added)
                added[entry.key] = entry
            else:
                _check_removed(entry, registrations)
                removed[entry.key] = entry
    for key in added.keys() & removed.keys():
        if added[key].kind == removed[key].kind:
            raise added[key].error(f"the same variable says {removed[key].text!r}.  Leave out one of the two.")
        del removed[key]
    kept = [r for r in registrations if (id(r.module), r.name) not in removed]
    ours = [Registration(entry.kind, entry.owner, entry.name) for entry in added.values()]
    return [*ours, *kept], [(entry.owner, entry.name) for entry in removed.values()]


def _parsed(kind: str, text: str) -> _Entry:
    if text[0] not in "+-":
        raise _error(kind, text, f"no sign.  Use '+{text}' to put it on the {kind} list, '-{text}' to take it off.")
    path, _, name = text[1:].strip().rpartition(".")
    if not path or not all(part.isidentifier() for part in (*path.split("."), name)):
        raise _error(kind, text, f"no dotted name of a function, such as {_EXAMPLE}.")
    try:
        owner = pkgutil.resolve_name(path)
    except Exception as error:  # an import may raise anything
        raise _error(
            kind,
            text,
            f"there is no {path} to import ({type(error).__name__}: {error}).  Use the full name, such as {_EXAMPLE}.",
        ) from error
    entry = _Entry(kind, text, owner, name)
    if not callable(getattr(owner, name, None)):
        raise entry.error(f"{path} has no function of the name {name}.")
    if not isinstance(owner, (ModuleType, type)) or not is_patchable(owner):
        raise entry.error(f"functions of {path} cannot be replaced; those of modules and Python classes can.")
    return entry


def _check_added(entry: _Entry, added: Mapping[tuple[int, str], _Entry]) -> None:
    if entry.key in added:
        raise entry.error(f"{VARIABLES[added[entry.key].kind]} adds it already.  Leave out one of the two.")
    if "banned" in _lists_of(entry):
        raise entry.error("it is banned on float16.  Call amp.initialize(..., allow_banned=True) to run it in FP32.")


def _check_removed(entry: _Entry, registrations: Sequence[Registration]) -> None:
    lists = [*_lists_of(entry), *(r.kind for r in registrations if (id(r.module), r.name) == entry.key)]
    if entry.kind not in lists:
        found = f"it is on the list {lists[0]!r}" if lists else "it is on no list"
        remedy = f"Put it in {VARIABLES[lists[0]]}." if lists and lists[0] in VARIABLES else "Leave the entry out."
        raise entry.error(f"not on the {entry.kind} list; {found}.  {remedy}")


def _lists_of(entry: _Entry) -> Iterator[str]:
    lists = _LISTS.get(id(entry.owner), CastLists())
    for kind, names in vars(lists).items():
        if entry.name in names:
            yield "promote" if kind == "sequence" else kind


def _error(kind: str, text: str, complaint: str) -> AmpValueError:
    return AmpValueError(f"{VARIABLES[kind]}: in {text!r}, {complaint}")
