"""Notes (not verdicts) on patterns around `amp` that went wrong under apex, or that are different here.

A note is given only if one file is enough to decide.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set

_AMP = "apex.amp."
_WRAPPERS = {
    "apex.parallel.DistributedDataParallel",
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
    "torch.nn.parallel.DistributedDataParallel",
}
_BINARY_CROSS_ENTROPIES = {"torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss"}
_TAKE_WEIGHTS = {
    *(f"torch.{name}" for name in ["addmm", "bmm", "einsum", "matmul", "mm", "mv", "tensordot"]),
    *(f"torch.nn.functional.conv{name}" for name in ["1d", "2d", "3d", "_transpose1d", "_transpose2d", "_transpose3d"]),
    *(f"torch.nn.functional.{name}" for name in ["bilinear", "embedding", "group_norm", "layer_norm", "linear"]),
}
_VIEWS = {"detach", "expand", "flatten", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view"}
_CASTS = {"bfloat16", "float", "half", "to", "type", "type_as"}
_FUNCTION_LEVELS = {"O1", "O4"}


class Traps:
    """The notes on one file.

    Args:
        calls: the calls in the file, each with the dotted name of the called function.
    """

    def __init__(self, tree: ast.Module, calls: Mapping[ast.Call, str]) -> None:
        self._tree = tree
        self._calls = calls
        self._initialize = self._calls_of(f"{_AMP}initialize")
        self._scale_loss = self._calls_of(f"{_AMP}scale_loss")
        self._levels = {_level(call) for call in self._initialize}
        self._assigned = {
            node.value: [part for target in node.targets for part in _elements(target)]
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
        }

    def notes(self) -> Iterator[tuple[ast.expr, str]]:
        """Yield calls and products, each with its note."""
        if self._initialize or self._scale_loss:
            yield from self._tuples()
            yield from self._closures()
            yield from self._products_with_weights()
            yield from self._binary_cross_entropies()
            yield from self._wrapped_too_early()
            yield from self._writes_into_state_dicts()

    def _calls_of(self, *names: str) -> list[ast.Call]:
        return [call for call, name in self._calls.items() if name in names]

    def _objects(self, calls: list[ast.Call], index: int, keyword: str) -> set[str]:
        """Return the source of each object that `calls` pass as this argument, or `initialize` returns at `index`."""
        passed = {ast.unparse(o) for call in calls for o in _elements(_argument(call, index, keyword))}
        results = (self._assigned.get(call, []) for call in self._initialize)
        return passed | {ast.unparse(parts[index]) for parts in results if len(parts) == 2}

    def _tuples(self) -> Iterator[tuple[ast.Call, str]]:
        for call in self._initialize:
            if isinstance(_argument(call, 1, "optimizers"), ast.Tuple):
                yield call, "a tuple of optimizers is a TypeError, as in apex: pass a list"

    def _closures(self) -> Iterator[tuple[ast.Call, str]]:
        optimizers = self._objects(self._initialize + self._scale_loss, 1, "optimizers")
        for call in self._calls:
            if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
                continue
            owner, closure = ast.unparse(call.func.value), _argument(call, 0, "closure")
            if owner in optimizers and closure is not None and not isinstance(closure, ast.Constant):
                yield call, f"a closure is refused at O1 and O2, as in apex: run it first, then {owner}.step()"

    def _products_with_weights(self) -> Iterator[tuple[ast.expr, str]]:
        if self._levels and self._levels <= {"O0", *_FUNCTION_LEVELS}:
            return
        models = self._objects(self._initialize, 0, "models")
        models |= {
            ast.unparse(target)
            for call in self._calls_of(*_WRAPPERS)
            if call.args and ast.unparse(call.args[0]) in models
            for target in self._assigned.get(call, [])
        }
        products: list[tuple[ast.expr, list[ast.expr]]] = [
            (call, [*call.args, *(keyword.value for keyword in call.keywords)])
            for call in self._calls_of(*_TAKE_WEIGHTS)
        ]
        for node in ast.walk(self._tree):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                products.append((node, [node.left, node.right]))
        for product, operands in products:
            ours = [ast.unparse(tensor) for tensor in map(_viewed, operands) if models.intersection(_owners(tensor))]
            weights = list(dict.fromkeys(ours))
            if weights and not any(map(_is_cast, operands)):
                yield (
                    product,
                    f"at O2, O3 and O5 {' and '.join(weights)} {'is' if len(weights) == 1 else 'are'} half, and what "
                    "the model and its parts take and give is not: write "
                    f"{' and '.join(f'{weight}.float()' for weight in weights)}",
                )

    def _binary_cross_entropies(self) -> Iterator[tuple[ast.Call, str]]:
        allowed = any(keyword.arg in ("allow_banned", None) for call in self._initialize for keyword in call.keywords)
        # Scripts that keep BCELoss at O1 run the sigmoid before it in FP32, as apex's message recommended.
        if allowed or self._calls_of(f"{_AMP}register_float_function") or not self._levels & {"O1", None}:
            return
        for call in self._calls_of(*_BINARY_CROSS_ENTROPIES):
            yield (
                call,
                "at O1 an error on float16 input, as in apex: write binary_cross_entropy_with_logits "
                "(BCEWithLogitsLoss), or amp.initialize(..., allow_banned=True)",
            )

    def _wrapped_too_early(self) -> Iterator[tuple[ast.Call, str]]:
        for before, after in _in_order(self._tree):
            wrapped = {
                ast.unparse(target)
                for call in before
                if self._calls.get(call) in _WRAPPERS
                for target in self._assigned.get(call, [])
            }
            for call in after:
                models = {ast.unparse(m) for m in _elements(_argument(call, 0, "models"))}
                for model in sorted(models & wrapped) if call in self._initialize else []:
                    yield call, f"refuses {model} once it is wrapped for parallel training, as in apex: wrap it after"

    def _writes_into_state_dicts(self) -> Iterator[tuple[ast.expr, str]]:
        if self._levels and self._levels <= {"O0", *_FUNCTION_LEVELS}:
            return
        optimizers = self._objects(self._initialize + self._scale_loss, 1, "optimizers")
        loaded = {
            ast.unparse(argument)
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "load_state_dict"
            for argument in node.args
        }
        models: dict[str, str] = {}  # the source of a state dictionary -> the model that gave it
        for node in ast.walk(self._tree):
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr="state_dict")) if (
                    ast.unparse(owner) not in optimizers
                ):
                    sources = {ast.unparse(source) for source in [node, *self._assigned.get(node, [])]}
                    models |= dict.fromkeys(sources - loaded, ast.unparse(owner))
        for written, source in _written_entries(self._tree, set(models)):
            yield (
                written,
                f"at O2, O3 and O5 {models[source]}.state_dict() gives FP32 copies, and this does not reach the model: "
                f"call {models[source]}.load_state_dict(...) with the dictionary that was written",
            )


def _written_entries(tree: ast.AST, sources: Set[str]) -> Iterator[tuple[ast.expr, str]]:
    """Yield each expression that writes into a tensor of the dictionaries `sources`, with the dictionary."""
    variables: dict[ast.AST, dict[str, str]] = {}  # node -> names of tensors in it, with their dictionaries
    for node in ast.walk(tree):
        names = dict(variables.get(node, {}))
        match node:
            case ast.For(target=target, iter=ast.Call(func=ast.Attribute(value=owner, attr="items" | "values"))):
                if (source := ast.unparse(owner)) in sources:
                    names[ast.unparse(_elements(target)[-1])] = source
        variables |= dict.fromkeys(ast.iter_child_nodes(node), names)
        match node:
            case ast.Call(func=ast.Attribute(value=written, attr=attr)) if attr.endswith("_") and attr[0] != "_":
                entry: ast.expr | None = written
            case ast.AugAssign(target=ast.expr() as entry) | ast.Assign(targets=[ast.Subscript(value=entry)]):
                pass
            case _:
                continue
        while isinstance(entry, ast.Attribute) and entry.attr == "data":
            entry = entry.value
        match entry:
            case ast.Subscript(value=owner) if ast.unparse(owner) in sources:
                yield entry, ast.unparse(owner)
            case ast.Name(id=name) if name in names:
                yield entry, names[name]


def _argument(call: ast.Call, index: int, name: str) -> ast.expr | None:
    """Return the argument that a call passes by position or by keyword."""
    if len(call.args) > index:
        return call.args[index]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _elements(node: ast.expr | None) -> list[ast.expr]:
    """Return the elements of a list or tuple; any other expression is its own only element."""
    if node is None:
        return []
    return node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]


def _viewed(node: ast.expr) -> ast.expr:
    """Return the tensor that an expression is a view of: `w` for `w.t()[:8]`."""
    while True:
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _VIEWS:
                node = value
            case ast.Attribute(value=value, attr="T" | "mT" | "data") | ast.Subscript(value=value):
                node = value
            case _:
                return node


def _owners(node: ast.expr) -> Iterator[str]:
    """Yield the owners of an attribute: `model.a[0]`, `model.a` and `model` for `model.a[0].b`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
        yield ast.unparse(node)


def _is_cast(node: ast.expr) -> bool:
    """True if an operand contains a cast."""
    return any(
        isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in _CASTS
        for child in ast.walk(node)
    )


def _level(call: ast.Call) -> str | None:
    """Return the opt_level of a call of initialize; None if the file does not say."""
    level = _argument(call, 3, "opt_level")
    if level is None and all(keyword.arg for keyword in call.keywords):
        return "O1"
    return level.value if isinstance(level, ast.Constant) and isinstance(level.value, str) else None


def _in_order(tree: ast.AST) -> Iterator[tuple[Set[ast.Call], Set[ast.Call]]]:
    """Yield the calls of each statement, with the calls of the statements that run after it in the same list."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, [])
            if not isinstance(statements, list):
                continue
            calls = [_run_by(statement) for statement in statements]
            yield from ((now, set().union(*calls[i:])) for i, now in enumerate(calls, 1) if now)


def _run_by(statement: ast.AST) -> set[ast.Call]:
    """Return the calls that running a statement makes, without those in functions that it defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return set()
    found = {statement} if isinstance(statement, ast.Call) else set()
    return found.union(*(_run_by(child) for child in ast.iter_child_nodes(statement)))
