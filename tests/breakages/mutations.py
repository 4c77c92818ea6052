"""Ways to break one expression of a source: found in its syntax tree, chosen by hashes of what the code says.

A choice depends on no file name and no line number, so code that only moves is broken as before. Some things are never
broken: what runs while a module is imported, annotations, assertions, and texts such as docstrings, f-strings and the
arguments of `raise`.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

OPPOSITE = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
TAKES_KEY = {"get", "pop", "setdefault"}
NO_ORDER = {"cast", "getattr", "hasattr", "isinstance", "issubclass", "max", "min", "setattr"}
NOT_BROKEN = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Ways = list["Breakage"]


@dataclass(frozen=True)
class Breakage:
    """The bytes from `start` to `end` of a file become `after`.

    The expression at `reached` runs wherever the broken code does.
    """

    path: str
    line: int
    operator: str
    start: int
    end: int
    before: str
    after: str
    reached: tuple[int, int]
    name: str = ""

    @property
    def room(self) -> str:
        """The first folder below the package."""
        parts = Path(self.path).parts
        return parts[1] if len(parts) > 2 else "(top)"

    def applied(self, source: bytes) -> bytes:
        """The source of the file with this breakage."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def choose(sources: dict[str, bytes], count: int, seed: int = 0) -> Ways:
    """`count` statements of all sources, each with one way to break it, ordered by file and line."""
    ways_of: dict[str, Ways] = {}
    seen: Counter[str] = Counter()
    for path, source in sorted(sources.items()):
        for text, ways in Finder(path, source).statements():
            seen[text] += 1
            ways_of[_hash(seed, text, seen[text])] = ways
    names = sorted(ways_of)[:count]
    chosen = [replace(ways_of[name][int(name, 16) % len(ways_of[name])], name=name[:8]) for name in names]
    return sorted(chosen, key=lambda breakage: (breakage.path, breakage.start))


def _hash(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def instrumented(source: bytes, breakages: Ways, first: str) -> bytes:
    """The source of one file, which calls `__reached__` with a breakage's name before it runs what would be broken."""
    marks = []
    for breakage in breakages:
        start, end = breakage.reached
        # Of marks at one place the outer one opens first and closes last.
        marks.append((start, 1, -end, f"(__reached__({breakage.name!r}) or ("))
        marks.append((end, 0, -start, "))"))
    for place, _, _, text in sorted(marks, reverse=True):
        source = source[:place] + text.encode() + source[place:]
    lines = source.decode().splitlines(keepends=True)
    lines.insert(_first_line_of_code(source), first + "\n")
    return "".join(lines).encode()


def _first_line_of_code(source: bytes) -> int:
    """The number of lines that docstring and `from __future__` take."""
    last = 0
    for statement in ast.parse(source).body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not (is_docstring or is_future):
            break
        last = statement.end_lineno or last
    return last


class Finder:
    """The statements of one source that can be broken."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def statements(self) -> Iterator[tuple[str, Ways]]:
        """Each statement inside a function: its text, with the function's name, and the ways to break it."""
        yield from self._below(ast.parse(self.source), "", in_function=False)

    def _below(self, node: ast.AST, function: str, *, in_function: bool) -> Iterator[tuple[str, Ways]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                inside = isinstance(child, FUNCTIONS)
                yield from self._below(child, f"{function}.{child.name}", in_function=inside)
            elif isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
                if in_function and (ways := list(self._ways(child, function))):
                    yield f"{function} {_text(child)}", ways
                yield from self._below(child, function, in_function=in_function)

    def _ways(self, statement: ast.AST, function: str) -> Iterator[Breakage]:
        if isinstance(statement, NOT_BROKEN):
            return
        yield from self._dropped(statement, function)
        if isinstance(statement, (ast.If, ast.While)):
            yield self._negated(statement.test)
        for expression in _expressions(statement):
            yield from self._inside(expression)

    def _dropped(self, statement: ast.AST, function: str) -> Iterator[Breakage]:
        match statement:
            case ast.Expr(value=ast.Call() as call):
                yield self._way("call dropped", call, "None")
            case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
                yield self._way("None returned", value, "None")
            case ast.AugAssign(value=value):
                yield self._way("assignment dropped", statement, "pass", reached=value)
            # Without an attribute that __init__ sets, nothing works: that would ask nothing of the tests.
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()], value=value) if "__init__" not in function:
                yield self._way("assignment dropped", statement, "pass", reached=value)

    def _inside(self, node: ast.AST) -> Iterator[Breakage]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                text = f"(({self._source(left)}) {OPPOSITE[type(operator)]} ({self._source(right)}))"
                yield self._way("comparison changed", node, text)
            case ast.BoolOp(op=operator, values=values):
                other = " or " if isinstance(operator, ast.And) else " and "
                text = other.join(f"({self._source(value)})" for value in values)
                yield self._way("and/or swapped", node, f"({text})")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._way("not deleted", node, f"({self._source(operand)})")
            case ast.Constant(value=bool(value)):
                yield self._way("True/False swapped", node, str(not value))
            case ast.Constant(value=int(value) | float(value)) if value in (0, 1):
                yield self._way("0/1 swapped", node, repr(type(value)(1 - value)))
            case ast.Call(func=called, args=[first, second, *_]):
                if _last_name(called) not in NO_ORDER:
                    yield from self._swapped(node, first, second)
            case ast.IfExp(test=test):
                yield self._negated(test)
            case ast.comprehension(ifs=tests):
                yield from map(self._negated, tests)
        for key in _keys(node):
            yield self._way("key changed", key, repr(f"{key.value}_"))
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, NOT_BROKEN):
                yield from self._inside(child)

    def _negated(self, condition: ast.expr) -> Breakage:
        return self._way("condition negated", condition, f"(not ({self._source(condition)}))")

    def _swapped(self, call: ast.expr, first: ast.expr, second: ast.expr) -> Iterator[Breakage]:
        texts = self._source(first), self._source(second)
        if texts[0] != texts[1] and not any(isinstance(argument, ast.Starred) for argument in (first, second)):
            (_, first_end), (second_start, end) = self._span(first), self._span(second)
            between = self.source[first_end:second_start].decode()
            before, after = between.join(texts), between.join(reversed(texts))
            way = self._way("arguments swapped", first, after, reached=call)
            yield replace(way, end=end, before=before)

    def _way(self, operator: str, broken: ast.AST, after: str, *, reached: ast.AST | None = None) -> Breakage:
        start, end = self._span(broken)
        line = self.source.count(b"\n", 0, start) + 1
        before = self._source(broken)
        return Breakage(self.path, line, operator, start, end, before, after, self._span(reached or broken))

    def _span(self, node: ast.AST) -> tuple[int, int]:
        first = self.line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        last = self.line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return first, last

    def _source(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()


def _expressions(statement: ast.AST) -> list[ast.expr]:
    """The expressions that a statement computes: not its annotation or target, not the statements inside it."""
    match statement:
        case ast.If(test=value) | ast.While(test=value) | ast.For(iter=value) | ast.Match(subject=value):
            return [value]
        case ast.With(items=items):
            return [item.context_expr for item in items]
        case ast.Return() | ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Expr():
            is_docstring = isinstance(statement.value, ast.Constant) and isinstance(statement, ast.Expr)
            return [statement.value] if statement.value is not None and not is_docstring else []
    return []


def _text(statement: ast.AST) -> str:
    if hasattr(statement, "body"):
        return f"{type(statement).__name__} {' '.join(map(ast.unparse, _expressions(statement)))}"
    return ast.unparse(statement)


def _last_name(called: ast.expr) -> str:
    return ast.unparse(called).rpartition(".")[2]


def _keys(node: ast.AST) -> Iterator[ast.Constant]:
    """Strings that something is looked up by, or compared with."""
    possible: list[ast.expr | None] = []
    match node:
        case ast.Subscript(slice=key):
            possible = [key]
        case ast.Dict(keys=keys):
            possible = list(keys)
        case ast.Call(func=called, args=[key, *_]) if _last_name(called) in TAKES_KEY:
            possible = [key]
        case ast.Compare(left=left, comparators=right):
            possible = [left, *right]
    yield from (key for key in possible if isinstance(key, ast.Constant) and isinstance(key.value, str))
