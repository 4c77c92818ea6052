"""The rules of the house as tests: imports point down, one file patches, one module holds the engine."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "amp_engine"
MODULES = {
    "amp_engine." + ".".join(p.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted(PACKAGE.rglob("*.py"))
    if p != PACKAGE / "__init__.py"
}

# Each line may import from the lines above it, never from its own line or from below.
LAYERS = [
    ["torch_private", "errors", "messages"],
    ["copying", "distributed", "random_state", "reachable", "tables", "kernels._native", "casting.locks"],
    ["devices", "checkpoint_file"],
    ["kernels.layout", "kernels.backend", "kernels.library", "kernels.halves"],
    ["dtypes", "dynamo", "stepping", "compat", "telemetry"],
    ["telemetry.history", "telemetry.magnitudes", "telemetry.markup", "telemetry.software", "telemetry.records"],
    ["telemetry.delta_debugging", "telemetry.put_back"],
    ["telemetry.wording", "telemetry.comparison"],
    ["containers", "scale_rule", "scale_snapshot"],
    ["policy"],
    ["kernels.refusals", "kernels.formulas", "levels"],
    ["fsdp", "policy_file"],
    ["kernels.reference_lists", "kernels.reference_tensor_lists", "kernels.native"],
    ["kernels.reference_steps"],
    ["kernels.reference"],
    ["kernels.choice"],
    ["kernels.tensor_lists", "kernels.list_check", "kernels.table", "kernels.ops"],
    ["kernels.steps"],
    ["kernels"],
    ["optimizers.rules"],
    ["optimizers.state_form"],
    ["optimizers.step_table"],
    ["optimizers.fused_step"],
    ["optimizers.base"],
    ["optimizers.fused_adagrad", "optimizers.fused_adam", "optimizers.fused_lamb"],
    ["optimizers.fused_novograd", "optimizers.fused_sgd", "optimizers.larc"],
    ["optimizers.fused_mixed_precision_lamb", "optimizers.wrapped"],
    ["optimizers"],
    ["stepping.master_parameter", "stepping.arithmetic", "stepping.reduction", "stepping.exact"],
    ["stepping.own_step", "stepping.slots", "stepping.seen"],
    ["stepping.ghost", "stepping.forward_order"],
    ["auto_scale"],
    ["report", "scaler", "arguments", "half_weights", "stepping.master"],
    ["stepping.columns", "stepping.scaling", "stepping.backward"],
    ["stepping.double_backward", "stepping.evidence", "stepping.last_step", "telemetry.post_mortem"],
    ["stepping.rows"],
    ["stepping.split_rows"],
    ["casting.lists", "casting.cache", "casting.regions"],
    ["casting.calls", "casting.registration", "casting.patches", "forward_casts"],
    ["casting.wrappers", "casting.weight_watch"],
    ["casting.recurrent", "casting.in_force"],
    ["casting.patched"],
    ["casting.compiled"],
    ["casting.patcher"],
    ["casting.keep_float", "casting.overrides", "casting.original"],
    ["casting.function_casts"],
    ["casting.explain"],
    ["casting.engine_casts"],
    ["casting"],
    ["checkpoint", "scaler_state", "collectives", "stepping.strays", "stepping.pending", "stepping.shards"],
    ["model", "stepping.window", "stepping.ranks"],
    ["stepping.stepped"],
    ["stepping.unlisted"],
    ["stepping.scaled_backwards", "stepping.clipping", "compat.face", "replaced"],
    ["stepping.hook"],
    ["telemetry.module_names", "telemetry.rehearsal", "telemetry.closed_gradients"],
    ["telemetry.relative_error", "kept_by_policy"],
    ["telemetry.batch_recording"],
    ["averages", "telemetry.overflow_watch", "telemetry.find_overflow", "compat.views", "compat.handle"],
    ["request"],
    ["initialized", "named"],
    ["saving", "explaining"],
    ["engine"],
    ["compat.settings", "telemetry.kept", "telemetry.plots"],
    ["telemetry.shapes", "telemetry.memory", "telemetry.stepped_by", "telemetry.step_times", "telemetry.scalars"],
    ["telemetry.histogram_picture", "telemetry.gradient_watch", "telemetry.compare_levels"],
    ["telemetry.gradient_histogram", "telemetry.receipt_html", "telemetry.receipt_text"],
    ["telemetry.receipt", "telemetry.fp32_modules", "compat.state"],
    ["amp"],
    ["telemetry.callbacks"],
    ["advice.records", "advice.words", "advice.child.sitecustomize"],
    ["advice.fitting", "advice.figures"],
    ["advice.recommendation", "advice.trial"],
    ["advice.text"],
    ["advice.advice"],
    ["advice.running"],
    ["advice"],
    ["advice.command"],
    ["__main__"],
]
RANK = {f"amp_engine.{name}": i for i, layer in enumerate(LAYERS) for name in layer}

RUNS_SCRIPTS = {"amp_engine.advice.running"}  # as apex's house does; the only one that stands on that
APEX = {name for name in MODULES if name.split(".")[1] == "apex"}  # has apex's own house; it stands on all of the above


class Imports(ast.NodeVisitor):
    """Modules of the package that a file imports when it runs (not those for type checkers alone)."""

    def __init__(self):
        self.found = set()

    def visit_If(self, node):
        if getattr(node.test, "id", None) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Import(self, node):
        self.found |= {alias.name for alias in node.names if alias.name.startswith("amp_engine")}

    def visit_ImportFrom(self, node):
        assert node.level == 0, "relative import"
        if node.module and node.module.split(".")[0] == "amp_engine":
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            self.found |= {name if name in MODULES else node.module for name in inside}


def tree(path):
    return ast.parse(path.read_text())


def imports_of(name):
    imports = Imports()
    imports.visit(tree(MODULES[name]))
    return imports.found - {"amp_engine"}


def test_every_module_has_its_layer():
    assert set(MODULES) - APEX == set(RANK)


@pytest.mark.parametrize("name", RANK)
def test_imports_point_down(name):
    found = {other for other in imports_of(name) if other not in APEX or name not in RUNS_SCRIPTS}
    assert {other for other in found if other in APEX or RANK[other] >= RANK[name]} == set()


def test_what_answers_as_apex_imports_in_no_circle():
    assert not [name for name in APEX if any(other.startswith("amp_engine.advice") for other in imports_of(name))]
    graphlib.TopologicalSorter({name: imports_of(name) & APEX for name in APEX}).prepare()


def test_what_child_processes_load_first_imports_nothing_of_ours():
    # It is loaded from its file in every Python that starts, and must not bring torch with it.
    children = ("amp_engine.apex.children.sitecustomize", "amp_engine.advice.child.sitecustomize")
    for name in ("amp_engine.apex.finder", *children):
        roots = {n.module or "" for n in ast.walk(tree(MODULES[name])) if isinstance(n, ast.ImportFrom)}
        roots |= {a.name for n in ast.walk(tree(MODULES[name])) if isinstance(n, ast.Import) for a in n.names}
        assert {root.split(".")[0] for root in roots} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", ["scaler", "stepping.master", "casting"])
def test_scaler_masters_and_casting_do_not_know_each_other(name):
    others = {"scaler", "stepping.master", "casting"} - {name}
    for module, path in MODULES.items():
        if module.removeprefix("amp_engine.").startswith(name):
            imports = Imports()
            imports.visit(tree(path))
            assert not {i for i in imports.found for o in others if i.startswith(f"amp_engine.{o}")}


def test_a_file_is_read_in_one_go():
    longer = {name: len(path.read_text().splitlines()) for name, path in MODULES.items() if name not in APEX}
    assert {name: lines for name, lines in longer.items() if lines > 600} == {}


def attributes_of(cls):
    """What methods of a class assign to `self`."""
    targets = [
        target
        for node in ast.walk(cls)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {t.attr for t in flat if isinstance(t, ast.Attribute) and getattr(t.value, "id", None) == "self"}


def public_methods_of(cls):
    return {n.name for n in cls.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}


def test_a_class_can_be_held_in_mind():
    classes = {
        f"{name}.{cls.name}": cls
        for name, path in MODULES.items()
        if name not in APEX
        for cls in ast.walk(tree(path))
        if isinstance(cls, ast.ClassDef)
    }
    # Optimizers keep what their class in torch has as attributes; these are the classes of ours.
    assert {name: len(found) for name, cls in classes.items() if len(found := attributes_of(cls)) > 24} == {}
    assert {name: len(found) for name, cls in classes.items() if len(found := public_methods_of(cls)) > 32} == {}


def foreign_assignments(path):
    """Assignments to attributes of imported names, and calls of setattr and delattr."""
    module = tree(path)
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(module)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(module):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
        for target in targets:
            root = target
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in imported:
                yield ast.unparse(node)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("setattr", "delattr"):
            yield ast.unparse(node)


def test_one_file_assigns_to_modules_that_are_not_ours():
    assigning = {name for name, path in MODULES.items() if list(foreign_assignments(path))}
    assert assigning == {"amp_engine.casting.patches"}


def test_tensors_of_numbers_are_made_on_the_cpu():
    """`torch.tensor(x, device=gpu)` copies from memory that is not pinned: the host waits, and a capture breaks."""
    makers = {"tensor", "as_tensor"}
    elsewhere = [
        f"{path.name}:{node.lineno}"
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers
        for keyword in node.keywords
        if keyword.arg == "device" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value == "cpu")
    ]
    assert elsewhere == []


def test_only_amp_holds_an_engine():
    holders = {
        name
        for name, path in MODULES.items()
        for statement in tree(path).body
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        for call in ast.walk(statement)
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) in ("AmpState", "Engine")
    }
    assert holders == {"amp_engine.amp"}
    assert not [n for p in MODULES.values() for n in ast.walk(tree(p)) if isinstance(n, ast.Global)]


EXTRAS = {
    "amp_engine.telemetry.gradient_histogram": {"matplotlib"},
    "amp_engine.telemetry.histogram_picture": {"matplotlib"},
}


def test_nothing_but_torch_is_imported():
    # typing_extensions is for type checkers alone, which bring it.
    allowed = set(sys.stdlib_module_names) | {"torch", "amp_engine", "typing_extensions"}
    for module, path in MODULES.items():
        parsed = tree(path)
        for node in ast.walk(parsed):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            extras = EXTRAS.get(module, set()) if node not in parsed.body else set()  # only where it is used
            assert {n.split(".")[0] for n in names} <= allowed | extras, path


def test_what_type_checkers_bring_is_imported_by_them_alone():
    for path in MODULES.values():
        imports = [n for n in ast.walk(tree(path)) if getattr(n, "module", None) == "typing_extensions"]
        guarded = [
            n
            for block in ast.walk(tree(path))
            if isinstance(block, ast.If)
            for n in block.body
            if "TYPE_CHECKING" in ast.unparse(block.test)
        ]
        assert len(imports) == sum(getattr(n, "module", None) == "typing_extensions" for n in guarded), path


def test_importing_patches_nothing():
    code = """if True:
        import sys, torch, torch.nn.functional as F
        finders = list(sys.meta_path)
        spaces = (torch, F, torch.Tensor, torch.optim.Optimizer, torch.nn.Module, torch.nn.modules.rnn)
        before = [dict(vars(s)) for s in spaces]
        import amp_engine
        changed = [k for s, b in zip(spaces, before) for k, v in vars(s).items() if b.get(k, v) is not v]
        assert not changed, changed
        from torch.optim import optimizer
        assert not optimizer._global_optimizer_pre_hooks and not optimizer._global_optimizer_post_hooks
        assert sys.meta_path == finders
        assert not {m for m in sys.modules if m.startswith(("amp_engine.apex", "apex", "amp_C", "torch._dynamo"))}
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=PACKAGE.parent)


def test_exports_are_sorted_complete_and_the_same_from_amp():
    import amp_engine
    from amp_engine import amp

    assert amp_engine.__all__ == sorted(amp_engine.__all__)
    assert all(hasattr(amp_engine, name) for name in amp_engine.__all__)
    for name in amp.__all__:
        assert hasattr(amp, name)
        if name != "LossScaler":
            assert getattr(amp_engine, name) is getattr(amp, name)
    assert amp_engine._amp_state is amp._amp_state
