"""The dotted names that the expressions of a file stand for, read from its imports, assignments and scopes.

The order of statements is ignored: a name stands for everything that it is bound to anywhere in its scope, so that both
halves of `try: from apex import amp` and `except ImportError: from torch.cuda import amp` count.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TypeAlias

from amp_engine.tools.apex_check import inventory

UNKNOWN = "?"
IMPORTS_BY_NAME = {"__import__", "importlib.__import__", "importlib.import_module"}

# A dotted name; or an expression to resolve, with its scope.
Binding: TypeAlias = "str | tuple[ast.expr, Scope]"


@dataclass(eq=False)
class Scope:
    """The names bound in a module, class or function; `self.x` is a name of the class."""

    parent: Scope | None = None
    is_class: bool = False
    names: dict[str, list[Binding]] = field(default_factory=dict)
    elsewhere: dict[str, Scope] = field(default_factory=dict)  # names declared `global` or `nonlocal`

    def bind(self, name: str, *bindings: Binding) -> None:
        """Add bindings of `name`. Without any, `name` is bound to a value that has no attributes of interest."""
        self.elsewhere.get(name, self).names.setdefault(name, []).extend(bindings)

    def owner(self, name: str) -> Scope | None:
        """Return the scope that binds `name`, as seen from this one; None for builtins."""
        scope: Scope | None = self.elsewhere.get(name, self)
        while scope is not None:
            if name in scope.names and (scope is self or not scope.is_class):
                return scope
            scope = scope.parent
        return None

    def own_class(self) -> Scope | None:
        """Return the innermost enclosing class."""
        scope: Scope | None = self
        while scope is not None and not scope.is_class:
            scope = scope.parent
        return scope


class Names(ast.NodeVisitor):
    """Dotted names of the expressions in a file."""

    def __init__(self, tree: ast.Module) -> None:
        self._resolved: dict[tuple[Scope, str], set[str]] = {}
        self._module = self._scope = Scope()
        self.scopes: dict[ast.AST, Scope] = {tree: self._module}
        self.generic_visit(tree)

    def of(self, node: ast.AST, scope: Scope) -> set[str]:
        """Return every dotted name that `node`, an expression in `scope`, may stand for, without indices."""
        match node:
            case ast.Name():
                owner = scope.owner(node.id)
                return {node.id} if owner is None else self._bound(owner, node.id)
            case ast.Attribute():
                own = scope.own_class()
                if own is not None and isinstance(node.value, ast.Name) and f"{node.value.id}.{node.attr}" in own.names:
                    return self._bound(own, f"{node.value.id}.{node.attr}")
                return {f"{name}.{node.attr}" for name in self.of(node.value, scope)}
            case ast.Subscript() | ast.NamedExpr():
                return self.of(node.value, scope)
            case ast.IfExp():
                return self.of(node.body, scope) | self.of(node.orelse, scope)
            case ast.BoolOp():
                return set().union(*(self.of(value, scope) for value in node.values))
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if self.of(node.func, scope) & IMPORTS_BY_NAME:
                return {name.split(".")[0] if getattr(node.func, "id", "") == "__import__" else name}
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
                return {f"{each}.{name}" for each in self.of(value, scope)}
            case ast.Call():
                results = {f"{name}()" for name in self.of(node.func, scope)}
                return {name for name in results if inventory.canonical(name) != name} or {UNKNOWN}
        return {UNKNOWN}

    def _bound(self, owner: Scope, name: str) -> set[str]:
        key = owner, name
        if key not in self._resolved:
            self._resolved[key] = set()  # ends the recursion at `amp = amp`
            bindings = owner.names[name]
            self._resolved[key] = set().union(*({b} if isinstance(b, str) else self.of(*b) for b in bindings))
        return self._resolved[key]

    def visit_Import(self, node: ast.Import) -> None:
        """Bind `a` by `import a.b`, and `c` by `import a.b as c`."""
        for alias in node.names:
            first = alias.name.split(".")[0]
            self._scope.bind(alias.asname or first, alias.name if alias.asname else first)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Bind the imported names. A relative import is of the project's own files, even if one is called apex."""
        for alias in node.names:
            if node.level:
                self._scope.bind(alias.asname or alias.name, UNKNOWN)
            elif alias.name == "*":
                for name in inventory.members(inventory.canonical(node.module or "")):
                    self._scope.bind(name, f"{node.module}.{name}")
            else:
                self._scope.bind(alias.asname or alias.name, f"{node.module}.{alias.name}")

    def visit_Global(self, node: ast.Global) -> None:
        """Let the module's scope bind the names."""
        self._scope.elsewhere.update(dict.fromkeys(node.names, self._module))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        """Let the enclosing function that has the names bind them."""
        for name in node.names:
            self._scope.elsewhere[name] = (self._scope.parent or self._scope).owner(name) or self._scope

    def visit_Assign(self, node: ast.Assign) -> None:
        """Bind the targets."""
        for target in node.targets:
            self._bind(target, node.value)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign | ast.NamedExpr) -> None:
        """Bind the target, if it gets a value."""
        if node.value is not None:
            self._bind(node.target, node.value)
            self.visit(node.value)

    visit_NamedExpr = visit_AnnAssign  # noqa: N815 - ast's name

    def visit_For(self, node: ast.For) -> None:
        """Bind the target to an element, which has the name of the list."""
        self._bind(node.target, node.iter)
        for part in (node.iter, *node.body, *node.orelse):
            self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        """Bind the other targets: of `with`, `+=`, comprehensions."""
        if isinstance(node.ctx, ast.Store):
            self._scope.bind(node.id, UNKNOWN)

    def visit_arg(self, node: ast.arg) -> None:
        """Bind a parameter."""
        self._scope.bind(node.arg, UNKNOWN)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        """Bind the name and visit the definition in a scope of its own."""
        self._scope.bind(node.name, UNKNOWN)
        self._enter(node)

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # noqa: N815 - ast's names

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Visit the function in a scope of its own."""
        self._enter(node)

    def _enter(self, node: ast.AST) -> None:
        outer = self._scope
        self._scope = self.scopes[node] = Scope(outer, isinstance(node, ast.ClassDef))
        self.generic_visit(node)
        self._scope = outer

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        bindings = [] if isinstance(value, ast.Constant) else [(value, self._scope)]
        match target, value:
            case ast.Name(id=name), _:
                self._scope.bind(name, *bindings)
            case ast.Attribute(value=ast.Name(id="self"), attr=name), _:
                (self._scope.own_class() or self._scope).bind(f"self.{name}", *bindings)
            case ((ast.Tuple() | ast.List()), (ast.Tuple() | ast.List())) if len(target.elts) == len(value.elts):
                for each, its_value in zip(target.elts, value.elts, strict=True):
                    self._bind(each, its_value)
            case _:
                self.visit(target)
