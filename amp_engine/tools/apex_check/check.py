"""`python -m amp_engine.apex --check PATH...` lists a project's uses of apex, and how amp_engine answers each.

The project's files are parsed, never run or imported. A name is followed through the imports, assignments and scopes
of its own file, not from one file of the project into another.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from amp_engine.tools.apex_check import inventory
from amp_engine.tools.apex_check.imports import asks_for_apex, installs
from amp_engine.tools.apex_check.inventory import Row
from amp_engine.tools.apex_check.scopes import IMPORTS_BY_NAME, UNKNOWN, Names
from amp_engine.tools.apex_check.traps import Traps

_FOREIGN_FOLDERS = {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv"}
# A file without any of these words cannot use apex and is not parsed, so that a large project takes seconds.
_MENTIONS = re.compile("|".join(sorted({"amp_engine", *inventory.ROOTS, *inventory.ADDED})).encode())
_PROBES = {
    "importlib.util.find_spec",
    "importlib.metadata.distribution",
    "importlib.metadata.version",
    "importlib_metadata.distribution",
    "importlib_metadata.version",
}
_PROBED = "finds apex once amp_engine.apex.install is imported"
_REQUIRED = "`apex` of PyPI is another project: take the line out, amp_engine answers to apex"
_REQUIREMENT = re.compile(r"apex\s*(\[[^]]*\])?\s*([<>=!~][^@]*)?")
# Uses of apex in files that are not Python: a requirement of the bare name `apex`, and the launcher.
_REQUIREMENT_LINE = re.compile(r"^\s*(?:-\s*)?(apex)\s*([<>=!~;#].*)?$")
_LINES = {
    "*requirements*.txt": _REQUIREMENT_LINE,
    "requirements/*.txt": _REQUIREMENT_LINE,
    "environment*.y*ml": _REQUIREMENT_LINE,
    "setup.cfg": _REQUIREMENT_LINE,
    "pyproject.toml": re.compile(r"""^[^#]*[\[,\s]["'](apex)\s*([<>=!~;][^"']*)?["']"""),
    "*.sh": re.compile(r"^[^#]*-m\s+(apex\.parallel\.multiproc)\b"),
}
_PATTERNS = ("*.py", "*.ipynb", *_LINES)
# Notebooks: lines that only IPython reads, with the lines that go on with them; such lines with Python; a cell's first.
_COMMAND = re.compile(
    r"^([ \t]*)(?:[%!?]|(?:pip3?|conda|mamba|cd|ls|cat|cp|mv|rm|mkdir|git|wget) |\S.*(?:\?$|= *[!%]))(?:.*\\\n)*.*",
    re.MULTILINE,
)
_COMMAND_WITH_PYTHON = re.compile(r"^([ \t]*)%(?:time|timeit|prun|memit) +(?!-)(?=\S)", re.MULTILINE)
_CELL = re.compile(r"\s*%%(\w+|!)[ \t]*(.*)")
_OTHER_LANGUAGES = re.compile(
    "!|bash|sh|script|system|sx|cmd|perl|ruby|html|javascript|js|latex|markdown|svg|r|sql|bigquery|cython|writefile|file",
    re.IGNORECASE,
)

Verdict: TypeAlias = Literal["served", "different", "missing", "unknown", "not read", "note"]


@dataclass(frozen=True)
class Finding:
    """One use of apex in one line of a file."""

    path: str
    line: str  # in a notebook "cell:line"
    name: str
    verdict: Verdict
    text: str = ""


def main(arguments: list[str]) -> int:
    """Print the uses of apex in the files at the paths in `arguments`; with `--json` as one JSON object.

    Returns:
        0 if every use is served, 1 if one is not or a file that mentions apex cannot be read, 2 if a path is missing.
    """
    paths = [argument for argument in arguments if argument != "--json"]
    if why := complaint(paths, "--check"):
        print(why, file=sys.stderr)
        return 2
    read = list(files(paths))
    unanswered: list[Path] = []
    found = [finding for path in read for finding in check_file(path, unanswered)]
    if "--json" in arguments:
        uses = [asdict(finding) for finding in found]
        print(json.dumps({"files": len(read), "is_answered": not unanswered, "uses": uses}, indent=2))
    else:
        print(render(found, len(read), not unanswered))
    return int(any(finding.verdict in ("missing", "unknown", "not read") for finding in found))


def complaint(paths: list[str], option: str) -> str:
    """Return a sentence that names missing `paths` and what to type; empty if all exist."""
    wrong = [path for path in paths if not (Path(path).is_file() or Path(path).is_dir())]
    if not wrong and paths:
        return ""
    missing = "".join(f"{path}: no such file or folder.  " for path in wrong)
    return (
        f"{missing}Run python -m amp_engine.apex {option} PATH..., where PATH is a Python file, a notebook, or the "
        "folder of a project."
    )


# --- files ----------------------------------------------------------------------------------------


def mentions(source: bytes) -> bool:
    """True if a file may use apex."""
    return _MENTIONS.search(source) is not None or b"\0" in source  # in UTF-16 a zero byte is beside every letter


def files(paths: Iterable[str]) -> Iterator[Path]:
    """Yield each file to read once: the named files, and a project's own sources in the named folders."""
    seen: set[str] = set()
    for path in paths:
        for found in sorted(_below(Path(path))) if Path(path).is_dir() else [Path(path)]:
            real = os.path.realpath(found)
            if real not in seen:
                seen.add(real)
                yield found


def _below(folder: Path) -> Iterator[Path]:
    """Yield the files to read below `folder`, without folders of packages, environments and builds."""
    # Links to folders are not followed: they lead in circles, or out of the project.
    for root, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not (name.startswith(".") or name in _FOREIGN_FOLDERS or Path(root, name, "pyvenv.cfg").exists())
        ]
        shown = (Path(root, name) for name in names if not name.startswith("."))
        # Opening a pipe would block. A broken link is yielded, so that it is reported as unreadable.
        shown = (path for path in shown if path.is_file() or not path.exists())
        yield from (path for path in shown if any(path.match(pattern) for pattern in _PATTERNS))


def check_file(path: Path, unanswered: list[Path]) -> Iterator[Finding]:
    """Yield a file's uses of apex by line, or one finding that says why a file with a use cannot be read.

    Appends `path` to `unanswered` if a program in it cannot be read, or imports apex without amp_engine.apex.install.
    """
    try:
        source = path.read_bytes()
        if not mentions(source):
            return
        if path.suffix == ".ipynb":
            cells = _cells(source)
            programs = [[(number, _python_of(text).encode()) for number, text in cells]]
            for number, text in cells:  # a file that a cell writes is a program of its own
                if (cell := _CELL.match(text)) and cell[1] in ("writefile", "file") and cell[2].strip().endswith(".py"):
                    programs.append([(number, _without_first_line(text).encode())])
        elif any(path.match(pattern) for pattern in _LINES):
            yield from _check_lines(path, source.decode())
            return
        else:
            programs = [[("", source)]]
        for program in programs:
            yield from _check_program(path, program, unanswered)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:  # also of the parser
        unanswered.append(path)
        yield Finding(str(path), "0", "", "not read", f"{type(error).__name__}: {error}")


def _cells(source: bytes) -> list[tuple[str, str]]:
    """Return the code cells of a notebook, each with its number as a prefix of line numbers."""
    cells = json.loads(source)["cells"]
    return [(f"{i}:", "".join(cell["source"])) for i, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]


def _python_of(cell: str) -> str:
    """Return the Python of a notebook's cell, line by line; any other line becomes `pass` or empty."""
    magic = _CELL.match(cell)
    if magic and _OTHER_LANGUAGES.fullmatch(magic[1]):
        return ""
    if magic:
        cell = _without_first_line(cell)
    # Only in cells that are not valid Python, where `%` may begin a line of an expression, and `!` one of a string.
    if not _is_python(cell):
        cell = _COMMAND_WITH_PYTHON.sub(r"\1", cell)
        cell = _COMMAND.sub(lambda command: f"{command[1]}pass" + "\n" * command[0].count("\n"), cell)
    return cell


def _without_first_line(cell: str) -> str:
    return re.sub(r"\S.*", "", cell, count=1)


def _is_python(source: str) -> bool:
    try:
        _parse(source)
    except SyntaxError:
        return False
    except ValueError:  # a zero byte, which is reported with the program
        return True
    return True


def _parse(source: str | bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escape sequences are the project's own business
        return ast.parse(source)


def _check_lines(path: Path, text: str) -> Iterator[Finding]:
    expression = next(_LINES[pattern] for pattern in _LINES if path.match(pattern))
    for number, line in enumerate(text.splitlines(), 1):
        if match := expression.search(line):
            name = match[1]
            if name == "apex":
                yield Finding(str(path), str(number), name, "note", _REQUIRED)
            else:
                yield Finding(str(path), str(number), name, *_verdict(name, inventory.find(name)))


def _check_program(path: Path, cells: list[tuple[str, bytes]], unanswered: list[Path]) -> Iterator[Finding]:
    """Yield the findings of one program, given in `cells`: the source of each, and the prefix of its line numbers."""
    lines: list[str] = []
    body: list[ast.stmt] = []
    for prefix, source in cells:
        try:
            tree = _parse(source)
        except (SyntaxError, ValueError) as error:
            unanswered.append(path)
            number = getattr(error, "lineno", None) or 0
            why = getattr(error, "msg", None) or str(error)
            hint = "  Python 2 is not read." if "call to 'print'" in why or "multiple exception types" in why else ""
            yield Finding(str(path), f"{prefix}{number}", "", "not read", f"{why}.{hint}")
            continue
        ast.increment_lineno(tree, len(lines))
        lines += [f"{prefix}{number}" for number in range(1, len(source.splitlines()) + 3)]
        body += tree.body
    program = ast.Module(body, [])
    if any(map(asks_for_apex, body)) and not any(map(installs, ast.walk(program))):
        unanswered.append(path)
    uses = Uses(program)
    for number, name, verdict, text in sorted(uses.found):
        yield Finding(str(path), lines[number - 1], name, verdict, text)


# --- uses -----------------------------------------------------------------------------------------


class Uses(ast.NodeVisitor):
    """Finds a file's uses of apex: `found` holds line, name, verdict and text of each."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[tuple[int, str, Verdict, str]] = set()
        self._names = Names(tree)
        self._scope = self._names.scopes[tree]
        self._calls: dict[ast.Call, str] = {}
        self.generic_visit(tree)
        for node, text in Traps(tree, self._calls).notes():
            self._add(node, ast.unparse(node.func if isinstance(node, ast.Call) else node), "note", text)

    def visit(self, node: ast.AST) -> None:
        """Visit `node` in its scope."""
        outer = self._scope
        self._scope = self._names.scopes.get(node, outer)
        super().visit(node)
        self._scope = outer

    def visit_Import(self, node: ast.Import) -> None:
        """Report the modules."""
        for alias in node.names:
            self._report(node, {alias.name})

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Report the names."""
        for alias in node.names if not node.level else []:
            self._report(node, {f"{node.module}" if alias.name == "*" else f"{node.module}.{alias.name}"})

    def visit_Name(self, node: ast.Name | ast.Attribute) -> None:
        """Report an imported function or class. A module is reported with the name that is taken from it."""
        names = self._names.of(node, self._scope) if isinstance(node.ctx, ast.Load) else set()
        if not any(inventory.has_members(inventory.canonical(name)) for name in names):
            self._report(node, names)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Report the whole chain as one name, and visit the expressions in its brackets."""
        names = self._names.of(node, self._scope)
        if self._names.of(node.value, self._scope) == {UNKNOWN} and f"{UNKNOWN}.{node.attr}" not in names:
            self.visit_Name(node)  # self.amp, after self.amp = amp
            return
        if not self._report(node, names):
            self.generic_visit(node)
            return
        inner: ast.expr = node
        while isinstance(inner, (ast.Attribute, ast.Subscript)):
            if isinstance(inner, ast.Subscript):
                self.visit(inner.slice)
            inner = inner.value
        if not isinstance(inner, ast.Name):
            self.visit(inner)

    def visit_Call(self, node: ast.Call) -> None:
        """Report names in strings, probes for apex, and keywords."""
        called = self._names.of(node.func, self._scope)
        if len(called) == 1:
            (name,) = called
            self._calls[node] = inventory.canonical(name)
            self._report_keywords(node, inventory.canonical(name))
        match node.args:
            case [ast.Constant(value=str(name)), *_] if _is_apex(name):
                if called & IMPORTS_BY_NAME:
                    self._report(node, {name})
                if called & _PROBES:
                    self._add(node, f'{ast.unparse(node.func)}("{name}")', "note", _PROBED)
            case [owner, ast.Constant(value=str(name)), *_] if called & {"getattr", "hasattr", "setattr", "delattr"}:
                self._report(node, {f"{each}.{name}" for each in self._names.of(owner, self._scope)})
        if called == {"setuptools.setup"} or called == {"distutils.core.setup"}:
            self._report_requirements(node)
        self.generic_visit(node)

    def _report(self, node: ast.AST, names: set[str]) -> bool:
        """Record an expression that may stand for `names`; return True if one of them is apex's."""
        uses = {name for name in names if _is_apex(name)}
        for used in uses:
            name = inventory.canonical(used)
            row = inventory.find(name)
            # Another import may bind `amp` to torch.cuda.amp: a name that apex lacks is then torch's.
            if row is not None or (uses == names and not used.startswith("amp_engine.")):
                self._add(node, name, *_verdict(name, row))
        return bool(uses)

    def _report_keywords(self, node: ast.Call, name: str) -> None:
        called = inventory.find(name)
        if not _is_apex(name) or called is None or called.verdict == "missing":
            return
        taken = _keywords(name)
        for keyword in node.keywords:
            if taken is not None and keyword.arg is not None and keyword.arg not in taken:
                used = f"{name}({keyword.arg}=)"
                close = difflib.get_close_matches(keyword.arg, taken, n=1)
                instead = f"write {close[0]}=" if close else "leave it out"
                row = inventory.ROWS.get(used) or Row(used, "missing", f"{name} takes no such keyword: {instead}")
                self._add(keyword.value, used, *_verdict(used, row))

    def _report_requirements(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            if (keyword.arg or "").endswith(("_requires", "_require")):
                for child in ast.walk(keyword.value):
                    if isinstance(child, ast.Constant) and _REQUIREMENT.fullmatch(str(child.value)):
                        self._add(child, "apex", "note", _REQUIRED)

    def _add(self, node: ast.AST, name: str, verdict: Verdict, text: str) -> None:
        self.found.add((getattr(node, "lineno", 1), name, verdict, text))


def _is_apex(name: str) -> bool:
    root, _, rest = inventory.canonical(name).partition(".")
    return root in inventory.ROOTS or (root == "optimizer" and rest.split(".")[0] in inventory.ADDED)


def _verdict(name: str, row: Row | None) -> tuple[Verdict, str]:
    if row is not None:
        return row.verdict, row.text
    similar = inventory.similar(name)
    return "unknown", "not known as a name of apex" + (f": a typo of {similar}?" if similar else "")


@functools.cache
def _keywords(name: str) -> frozenset[str] | None:
    """Return the keywords of a served function or class; None if it takes any keyword, or has no signature."""
    try:
        parameters = inspect.signature(inventory.resolve(name)).parameters.values()
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in parameters)


# --- report ---------------------------------------------------------------------------------------


def render(found: list[Finding], read: int, is_answered: bool) -> str:
    """Return the findings as aligned text, a paragraph for each file, and a summary.

    Args:
        found: grouped by file.
        read: the number of files that were read.
        is_answered: amp_engine answers each import of apex without further changes.
    """
    if not found:
        other = "`python -m amp_engine advise train.py` tries amp with any script."
        return f"No use of apex in {_count(read, 'file')}.  {other}"
    paragraphs = []
    for path, of_file in itertools.groupby(found, lambda finding: finding.path):
        rows = [(f"{path}:{f.line}", f.name, f.verdict, f.text) for f in of_file]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
        lines = ("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows)
        paragraphs.append("\n".join(lines))
    return "\n\n".join([*paragraphs, _summary(found, read, is_answered)])


def _summary(found: list[Finding], read: int, is_answered: bool) -> str:
    names = {f.name: f.verdict for f in found if f.verdict not in ("note", "not read")}
    counts = Counter(names.values())
    unread = len({f.path for f in found if f.verdict == "not read"})
    parts = [
        f"{counts[verdict]} {verdict}" for verdict in ("served", "different", "missing", "unknown") if counts[verdict]
    ]
    text = f"{_count(len(names), 'name')} of apex in {_count(read, 'file')}: {', '.join(parts) or 'none'}."
    if unread:
        text += f"  {_count(unread, 'file')} could not be read."
    if counts["missing"] or counts["unknown"]:
        text += "  Write what stands beside the missing names" + (".", ", then")[not is_answered]
    elif names and is_answered:
        text += "  Nothing is left to do: amp_engine answers each import."
    elif names:
        text += "  Now"
    else:
        return text
    if is_answered:
        return text
    if all(name == "apex" or name.startswith(("apex.amp", "optimizer.")) for name in names):
        return (
            f"{text} write `from amp_engine import amp` for `from apex import amp`; or leave the imports alone and "
            "type `python -m amp_engine.apex train.py` in place of `python train.py`."
        )
    return (
        f"{text} run `python -m amp_engine.apex train.py` in place of `python train.py`; or, for good, type --fix in "
        "place of --check, which puts `import amp_engine.apex.install` before the first import of apex.  Files that "
        "use apex.amp alone can write `from amp_engine import amp`."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
