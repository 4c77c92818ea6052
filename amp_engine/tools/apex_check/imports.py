"""Tells which statements of a file import apex or test for it, and which make amp_engine answer."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from amp_engine.tools.apex_check import inventory

_BY_STRING = {"import_module", "__import__", "find_spec", "distribution", "version", "resolve_name"}


def asks_for_apex(statement: ast.stmt) -> bool:
    """True if a statement imports apex or one of its modules, or passes such a name to an import or a test for it."""
    for node in ast.walk(statement):
        match node:
            case ast.Import(names=names) if any(_is_root(alias.name) for alias in names):
                return True
            case ast.ImportFrom(module=str(name), level=0) if _is_root(name):
                return True
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if _is_root(name):
                if ast.unparse(node.func).rpartition(".")[2] in _BY_STRING:
                    return True
    return False


def imports_others(statement: ast.stmt) -> bool:
    """True if a statement, as it is run, imports a module that is neither Python's own nor torch or NumPy.

    These know no apex. Bodies of functions are run later, those of `if TYPE_CHECKING:` never.
    """
    match statement:
        case ast.Import(names=names):
            return any(_may_ask(alias.name) for alias in names)
        case ast.ImportFrom(module=module, level=level):
            return bool(level) or _may_ask(str(module))
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return False
        case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
            return any(map(imports_others, statement.orelse))
    return any(imports_others(child) for child in _statements_in(statement))


def _statements_in(statement: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, (ast.excepthandler, ast.match_case)):
            yield from _statements_in(child)


def _may_ask(name: str) -> bool:
    root = name.split(".")[0]
    return root not in sys.stdlib_module_names and root not in ("numpy", "torch")


def _is_root(name: str) -> bool:
    return name.split(".")[0] in inventory.ROOTS and name.replace(".", "").isidentifier()


def installs(node: ast.AST) -> bool:
    """True for `import amp_engine.apex.install`, or an import of the function that does the same."""
    match node:
        case ast.Import(names=names):
            return any(alias.name == "amp_engine.apex.install" for alias in names)
        case ast.ImportFrom(module="amp_engine.apex" | "amp_engine.apex.finder", names=names):
            return any(alias.name == "install" for alias in names)
    return False
