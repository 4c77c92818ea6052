"""The private names of torch that amp_engine uses: all are there, and none is used that is not listed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp  # imported by who shards, and not by torch
from torch import nn

from amp_engine.ground import torch_private
from amp_engine.ground.torch_private import NAMES, SEEN_IN, PrivateName

PACKAGE = Path(__file__).parent.parent / "amp_engine"
LISTED = PACKAGE / "ground" / "torch_private.py"
OTHERS = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if path != LISTED}
OWNERS = {
    torch.Tensor: torch.zeros(1),
    torch.UntypedStorage: torch.zeros(1).untyped_storage(),
    torch.autograd.graph.Node: torch.zeros(1, requires_grad=True).exp().grad_fn,
    nn.Module: nn.Module(),
    torch.optim.Optimizer: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
}
# Set on the objects named, as an attribute that Python code, or a test, could have as well.
SET_BY_US = {"_warned_capturable_if_run_uncaptured", "_metadata"}


def resolved(entry: PrivateName) -> Any:
    """Return what the name stands for. Raises AttributeError."""
    if entry.owner is not None:
        return getattr(OWNERS[entry.owner], entry.name)
    parts = entry.name.split(".")
    length = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules)
    found: Any = sys.modules[".".join(parts[:length])]
    for part in parts[length:]:
        found = getattr(found, part)
    return found


def is_there(entry: PrivateName) -> bool:
    try:
        resolved(entry)
    except AttributeError:
        return False
    return True


def test_torch_has_them():
    missing = {entry.name: entry.purpose for entry in NAMES if not is_there(entry)}
    assert missing == {}, f"torch {torch.__version__} lacks what amp_engine needs for these purposes"


def test_the_versions_are_those_of_ci():
    root = PACKAGE.parent
    texts = [(root / name).read_text() for name in (".ci/run", "Makefile")]
    assert all(any(f"torch=={version}" in text for text in texts) for version in SEEN_IN)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imported(tree: ast.AST) -> set[str]:
    """Private names of torch that a file imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("torch.") and is_private(name)}


def called(tree: ast.AST) -> set[str]:
    """Private names that a file looks up in modules of torch."""
    names = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    starts = ("torch.", "nn.", "F.", "dist.", "_C.")
    return {n for n in names if n.startswith(starts) and is_private(n) and not n.startswith("torch._foreach_")}


def attributes(tree: ast.AST) -> set[str]:
    """Private attributes of torch's objects that a file looks at, or names in a string."""
    private = {name for owner in OWNERS.values() for name in dir(owner) if name.startswith("_") and name[1] != "_"}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and dotted(node.value) != "self"}
    names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return names & private


def test_every_attribute_that_is_used_is_listed_and_every_one_that_is_listed_is_used():
    used = {path: attributes(tree) for path, tree in OTHERS.items()}
    listed = {entry.name for entry in NAMES if entry.owner}
    assert {path: names - listed - SET_BY_US for path, names in used.items() if names - listed - SET_BY_US} == {}
    assert listed <= set().union(*used.values())


def test_no_other_file_imports_or_calls_private_names():
    used = {path: imported(tree) | called(tree) for path, tree in OTHERS.items()}
    assert {path: names for path, names in used.items() if names} == {}, "have it in torch_private.py, with its purpose"


def test_every_name_that_is_bound_is_listed():
    tree = ast.parse(LISTED.read_text())
    listed = {entry.name for entry in NAMES}
    bound = {name.replace("_C.", "torch._C.", 1) if name.startswith("_C.") else name for name in called(tree)}
    bound |= imported(tree)
    is_part = {name for name in bound if any(other.startswith(f"{name}.") for other in bound | listed)}
    keys = {name for name in bound if name.startswith("torch._C._TorchDispatchModeKey.")}
    assert bound - is_part - keys <= listed


def test_a_lazy_clone_is_copy_on_write():
    assert torch._C._is_cow_tensor(torch_private.lazy_clone(torch.ones(2)))
