"""`python -m amp_engine.apex --fix PATH...` adds one line to each file that imports apex; `--undo` removes it.

The line is at the top level, before the first statement that imports apex, tests for it, or imports a module that is
not Python's own, since that may do so. Files are parsed, never run; all other bytes stay as they are.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from amp_engine.tools.apex_check import check
from amp_engine.tools.apex_check.imports import asks_for_apex, imports_others, installs

LINE = b"import amp_engine.apex.install  # for the imports of apex below; `python -m amp_engine.apex --undo` removes it"
BY_HAND = "put `import amp_engine.apex.install` before its first import of apex by hand"


class _NotFixedError(Exception):
    """Says why a file that imports apex is left as it is."""


def main(paths: list[str], *, undo: bool) -> int:
    """Rewrite the files at `paths` that import apex, or undo that, and print the changes as a diff.

    Returns:
        0 if each file that needs the line has it, or none has it after `undo`; 1 if a file was left as it is; 2 if a
        path is missing, where no file is changed.
    """
    if complaint := check.complaint(paths, "--undo" if undo else "--fix"):
        print(complaint, file=sys.stderr)
        return 2
    changed, left = 0, []
    for path in check.files(paths):
        try:
            before = path.read_bytes()
            after = without_line(before) if undo else with_line(path, before)
            if after != before:
                path.write_bytes(after)
                print(_diff(path, before, after), end="")
                changed += 1
        except _NotFixedError as reason:
            left.append(f"{path}: {reason}")
        except OSError as error:
            left.append(f"{path}: {error}")
    print("".join(f"{line}\n" for line in left), end="", file=sys.stderr)
    done = f"{changed} file{'s' * (changed != 1)} changed"
    print(f"{done}." if undo or not changed else f"{done}.  The same command with --undo takes it back.")
    return int(bool(left))


def with_line(path: Path, source: bytes) -> bytes:
    """Return the source of a file with the line added; unchanged if it imports no apex, or already has such a line."""
    if path.suffix not in (".py", ".ipynb") or not check.mentions(source):
        return source
    if path.suffix == ".ipynb":
        raise _NotFixedError(f"a notebook is left as it is: {BY_HAND}, in a cell")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _NotFixedError(f"cannot be read: {error}") from None
    first = next((i for i, statement in enumerate(tree.body) if asks_for_apex(statement)), None)
    if first is None or any(installs(node) for node in ast.walk(tree)):
        return source
    first = next((i for i, statement in enumerate(tree.body[:first]) if imports_others(statement)), first)
    while first and _first_line(tree.body[first]) <= (tree.body[first - 1].end_lineno or 0):  # `import os; import apex`
        first -= 1
    lines = source.splitlines(keepends=True)
    end = b"\r\n" if source.count(b"\r\n") else b"\n"
    at = _first_line(tree.body[first]) - 1
    fixed = b"".join([*lines[:at], LINE, end, *lines[at:]])
    _check_one_added(tree, fixed)
    return fixed


def without_line(source: bytes) -> bytes:
    """Return the source of a file without the line that `with_line` adds."""
    lines = source.splitlines(keepends=True)
    return b"".join(line for line in lines if line.rstrip(b"\r\n") != LINE)


def _first_line(statement: ast.stmt) -> int:
    """Return the number of the first line of a statement, decorators included."""
    return min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", ()))])


def _check_one_added(before: ast.Module, fixed: bytes) -> None:
    """Raise if `fixed` is not the same program with one more import: docstrings and `from __future__` come first."""
    try:
        compile(fixed, "<fixed>", "exec", dont_inherit=True)
        after = ast.parse(fixed)
    except SyntaxError:
        after = ast.Module([], [])
    own = [statement for statement in after.body if not installs(statement)]
    same = ast.dump(ast.Module(own, [])) == ast.dump(before)
    if not same or ast.get_docstring(after) != ast.get_docstring(before):
        raise _NotFixedError(f"is left as it is: {BY_HAND}")


def _diff(path: Path, before: bytes, after: bytes) -> str:
    def lines(text: bytes) -> Sequence[str]:
        return text.decode("utf-8", "replace").splitlines(keepends=True)

    return "".join(difflib.unified_diff(lines(before), lines(after), str(path), str(path), n=1))
