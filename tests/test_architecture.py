"""The rules of the house as tests: imports point down, one file patches, one module holds the engine."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "amp_engine"
MODULES = {
    "amp_engine." + ".".join(p.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted(PACKAGE.rglob("*.py"))
    if p != PACKAGE / "__init__.py"
}

# Each room, a folder or a file of the package or of its tools, may import from itself and from the rooms before it.
ROOMS = [
    *("errors", "ground", "kernels", "levels", "scaling", "optimizers", "casting", "stepping"),
    *("apex_private", "initialization", "saving", "engine", "grad_scaler"),
    *("tools", "tools.policy_file", "tools.software", "tools.apex_check"),
    *("tools.page", "tools.explanation", "tools.diagnosis", "tools.telemetry"),
    *("amp", "integrations", "tools.advice", "__main__"),
]
RUNS_SCRIPTS = {"amp_engine.tools.advice.running"}  # as apex's house does; the only one that stands on that
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


class ImportsForCheckers(Imports):
    """Collects also imports for type checkers alone."""

    def visit_If(self, node):
        self.generic_visit(node)


def imports_of(name, imports=Imports):
    found = imports()
    found.visit(tree(MODULES[name]))
    return found.found - {"amp_engine"}


def room_of(name):
    _, room, *inside = name.split(".")
    return f"tools.{inside[0]}" if room == "tools" and inside else room


def is_tool(name):
    return name.split(".")[1] == "tools"


def test_every_module_is_in_a_room():
    assert {room_of(name) for name in set(MODULES) - APEX} == set(ROOMS)


def test_imports_point_down_from_room_to_room():
    offenders = [
        f"{name} imports {other}"
        for name in set(MODULES) - APEX
        for other in imports_of(name)
        if other not in APEX and ROOMS.index(room_of(other)) > ROOMS.index(room_of(name))
    ]
    assert offenders == []
    assert not [name for name in set(MODULES) - APEX - RUNS_SCRIPTS if imports_of(name) & APEX]


def test_no_module_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter({name: imports_of(name) - {name} for name in MODULES}).prepare()


# Modules that import, for type checkers alone, a module that imports them.
NAMED_BY_THEIR_OWN = {"amp_engine.kernels.backend": "amp_engine.kernels.formulas"}


def test_no_other_module_does_so_for_type_checkers():
    imports = {name: imports_of(name, ImportsForCheckers) - {name, NAMED_BY_THEIR_OWN.get(name)} for name in MODULES}
    for name, found in imports.items():
        if not is_tool(name):  # the core tells checkers what its tools return
            found -= set(filter(is_tool, found))
    graphlib.TopologicalSorter(imports).prepare()


class ImportsAtOnce(Imports):
    """Leaves out what is imported in functions, when they are called."""

    def visit_FunctionDef(self, node):
        pass


COMMANDS = {"amp_engine.__main__", "amp_engine.apex.__main__"}
LOADS_TOOLS = {
    *("amp_engine.amp", "amp_engine.engine", "amp_engine.initialization.initialized"),
    "amp_engine.initialization.policy_argument",
}


def test_the_core_imports_no_tool():
    core = [name for name in MODULES if not is_tool(name)]
    assert [name for name in core if any(map(is_tool, imports_of(name, ImportsAtOnce)))] == []
    assert {name for name in core if any(map(is_tool, imports_of(name)))} == COMMANDS
    assert {name for name in core if "amp_engine.ground.tools" in imports_of(name)} == LOADS_TOOLS


def test_tools_are_loaded_by_the_first_overflow_or_call():
    code = """if True:
        import sys, torch, amp_engine
        from amp_engine import amp

        def tools():
            return {name for name in sys.modules if name.startswith("amp_engine.tools")}

        def step(factor):
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(1, 4)).sum() * factor, optimizer) as loss:
                loss.backward()
            optimizer.step()

        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, skip_on_overflow=True)
        step(1.0)
        amp.close()
        assert not tools(), tools()
        amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, skip_on_overflow=True)
        step(float("inf"))
        explain = "amp_engine.tools.diagnosis.overflow_watch"
        assert explain in tools() and "amp_engine.tools.explanation" not in tools(), tools()
        amp.explain()
        assert "amp_engine.tools.explanation" in tools() and "amp_engine.tools.advice" not in tools(), tools()
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=PACKAGE.parent)


def test_what_answers_as_apex_does_not_stand_on_the_command_that_advises():
    assert not [name for name in APEX if any(other.startswith("amp_engine.tools.advice") for other in imports_of(name))]


def test_what_child_processes_load_first_imports_nothing_of_ours():
    # It is loaded from its file in every Python that starts, and must not bring torch with it.
    children = ("amp_engine.apex.children.sitecustomize", "amp_engine.tools.advice.child.sitecustomize")
    for name in ("amp_engine.apex.finder", *children):
        roots = {n.module or "" for n in ast.walk(tree(MODULES[name])) if isinstance(n, ast.ImportFrom)}
        roots |= {a.name for n in ast.walk(tree(MODULES[name])) if isinstance(n, ast.Import) for a in n.names}
        assert {root.split(".")[0] for root in roots} <= set(sys.stdlib_module_names)


def test_casting_and_stepping_do_not_know_each_other():
    for one, other in (("casting", "stepping"), ("stepping", "casting"), ("casting", "scaling")):
        modules = [name for name in MODULES if room_of(name) == one]
        assert not [name for name in modules if other in map(room_of, imports_of(name))]


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


# Written from outside because a user may write them: settings of an engine, and what apex's private state shows.
SETTINGS = {"allow_incoming_model_not_fp32", "engine", "hard_override", "max_loss_scale", "min_loss_scale", "scalers"}
SETTINGS |= {"verbosity"}
NOT_OURS = {
    "grad",
    "param_groups",
    "enabled",
    "__qualname__",
}  # of torch and Python, which classes of ours have as well


def assigned_attributes(node):
    """Return every attribute that is assigned to or deleted in `node`."""
    return [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)]


def is_own(attribute):
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def rooms_of_attributes():
    """Name of each attribute that a class of ours assigns -> the rooms of such classes."""
    rooms = {}
    for name in set(MODULES) - APEX:
        for cls in (n for n in ast.walk(tree(MODULES[name])) if isinstance(n, ast.ClassDef)):
            found = [attribute.attr for attribute in assigned_attributes(cls) if is_own(attribute)]
            found += [s.target.id for s in cls.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
            for attribute in found:
                rooms.setdefault(attribute, set()).add(room_of(name))
    return rooms


def test_no_room_assigns_to_attributes_of_objects_of_another():
    rooms = rooms_of_attributes()
    offenders = [
        f"{name}:{attribute.lineno} assigns {ast.unparse(attribute)}, of {sorted(rooms[attribute.attr])}"
        for name in set(MODULES) - APEX
        for attribute in assigned_attributes(tree(MODULES[name]))
        if not is_own(attribute) and attribute.attr not in SETTINGS | NOT_OURS
        if attribute.attr in rooms and room_of(name) not in rooms[attribute.attr]
    ]
    assert offenders == []


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
    "amp_engine.tools.telemetry.histogram_picture": {"matplotlib"},
    "amp_engine.integrations.accelerate": {"accelerate"},
    "amp_engine.integrations.lightning": {"lightning"},
    "amp_engine.integrations.timm": {"timm"},
    "amp_engine.integrations.transformers": {"accelerate", "transformers"},
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
        assert not {m for m in sys.modules if m.startswith(("amp_engine.apex.", "apex", "amp_C", "torch._dynamo"))}
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=PACKAGE.parent)


def test_the_package_exports_its_classes_and_all_of_amp():
    import amp_engine
    from amp_engine import amp

    own = amp_engine.__all__[: -len(amp.__all__)]
    assert (own, amp.__all__) == (sorted(own), sorted(amp.__all__))
    assert amp_engine.__all__ == [*own, *amp.__all__]
    assert all(hasattr(amp_engine, name) for name in own)
    assert all(getattr(amp_engine, name) is getattr(amp, name) for name in ("_amp_state", *amp.__all__))
    assert set(amp_engine.__all__) < set(dir(amp_engine))
    names = {}
    exec("from amp_engine import *", names)
    assert all(names[name] is getattr(amp_engine, name) for name in amp_engine.__all__)


def strings_of(path):
    """The strings of a file that are no docstrings."""
    whole = tree(path)
    docstrings = {id(node.value) for node in ast.walk(whole) if isinstance(node, ast.Expr)}
    return [n.value for n in ast.walk(whole) if isinstance(n, ast.Constant) and id(n) not in docstrings]


def test_no_message_names_a_page_that_an_installation_lacks():
    named = {name: [one for one in strings_of(path) if ".md" in str(one)] for name, path in MODULES.items()}
    assert {name: found for name, found in named.items() if found} == {}
