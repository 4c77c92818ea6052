"""The table of what apex has: what it says is served, is there; what is there, is in it."""

import dataclasses
import importlib
import inspect
import pkgutil
from operator import attrgetter

import pytest
import torch

import amp_engine.apex
from amp_engine import amp
from amp_engine.tools.apex_check import inventory
from amp_engine.tools.apex_check.inventory import Row
from tests.models import MLP

THERE = [row.name for row in inventory.TABLE if row.verdict != "missing"]
NOT_THERE = [row.name for row in inventory.TABLE if row.verdict == "missing" and row.name[-1] not in "*)"]
PACKAGES = ["amp", "fp16_utils", "fused_dense", "mlp", "multi_tensor_apply", "normalization", "optimizers", "parallel"]
# They are there to say what to write in their place.
EXPLAIN_THEMSELVES = {
    "apex.amp._amp_state.handle.scale_loss",
    "apex.amp._amp_state.handle.wrap_optimizer",
    "apex.parallel.multiproc",
}


@pytest.fixture
def optimizer():
    """An optimizer under O1, where everything that initialize makes is there."""
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    yield optimizer
    amp.close()


def is_there(name, optimizer):
    root, _, rest = name.partition(".")
    try:
        if root == "optimizer":
            attrgetter(rest)(optimizer)
        else:
            inventory.resolve(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_what_the_table_says_is_there_is_there(optimizer):
    assert [name for name in THERE if not is_there(name, optimizer)] == []


def test_what_the_table_says_is_missing_is_not_there(optimizer):
    assert {name for name in NOT_THERE if is_there(name, optimizer)} == EXPLAIN_THEMSELVES


def test_every_public_name_and_every_module_of_a_package_has_a_row():
    for package in PACKAGES:
        module = importlib.import_module(f"amp_engine.apex.{package}")
        public = {name for name in getattr(module, "__all__", vars(module)) if not name.startswith("_")}
        ours = {name for name in public if not _is_borrowed(getattr(module, name))}
        assert ours
        names = ours | {name for _, name, _ in pkgutil.iter_modules(module.__path__)}
        assert {name for name in names if f"apex.{package}.{name}" not in inventory.ROWS} == set(), package


def test_every_package_is_in_the_table():
    assert set(amp_engine.apex._PARTS) == set(PACKAGES)
    assert {name.split(".")[1] for name in THERE if name.startswith("apex.")} >= set(PACKAGES)


def test_every_operation_of_amp_C_has_a_row():
    module = importlib.import_module("amp_engine.apex.amp_C")
    operations = {name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"}
    own = {name for name in operations if vars(module)[name].__module__ == module.__name__}
    assert own
    assert {name for name in own if f"amp_C.{name}" not in inventory.ROWS} == set()


def test_no_name_has_two_rows():
    assert len(inventory.ROWS) == len(inventory.TABLE)


def test_rows_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        inventory.TABLE[0].name = "other"


def test_every_row_below_another_has_a_row_above():
    parents = {name.split("(")[0].rpartition(".")[0] for name in inventory.ROWS}
    assert {parent for parent in parents if parent and parent != "optimizer" and parent not in inventory.ROWS} == set()


def test_nothing_is_below_what_is_missing_but_what_is_missing_in_another_way():
    for row in inventory.TABLE:
        above = inventory.ROWS.get(row.name.rpartition(".")[0])
        assert row.verdict == "missing" or above is None or above.verdict != "missing", row.name


def test_every_missing_name_says_what_to_write_in_one_line():
    for row in inventory.TABLE:
        assert bool(row.text) == (row.verdict != "served")
        assert "\n" not in row.text
        assert len(row.text) < 140, row


def test_what_is_to_be_written_for_torch_is_there():
    words = {word.strip(",;()") for row in inventory.TABLE if row.verdict == "missing" for word in row.text.split()}
    names = {word.split("(")[0] for word in words if word.startswith("torch.")}
    assert len(names) > 10
    for name in names:
        pkgutil.resolve_name(name)


def test_the_row_of_a_name_is_its_own_or_that_of_what_it_is_in():
    row_of = {
        "apex.amp.initialize": Row("apex.amp.initialize", "served"),
        "apex.amp.__dict__": Row("apex.amp", "served"),
        "apex.amp.scale_loss.__doc__": Row("apex.amp.scale_loss", "served"),
        "apex.amp.initialise": None,
        "apex.nothing": None,
        "apex.contrib.xentropy.softmax_xentropy": inventory.ROWS["apex.contrib.xentropy"],
        "apex.contrib.xentropy.softmax_xentropy.X": inventory.ROWS["apex.contrib.xentropy"],
        "apex.contrib.openfold_triton.mha": inventory.ROWS["apex.contrib"],
        "apex.optimizers.NpuFusedAdam": inventory.ROWS["apex.optimizers.NpuFused*"],
        "numpy.array": None,
    }
    assert {name: inventory.find(name) for name in row_of} == row_of


def test_two_names_of_one_thing_have_one_row():
    canonical = {
        "amp_engine.amp.scale_loss": "apex.amp.scale_loss",
        "amp_engine.apex.amp.scale_loss": "apex.amp.scale_loss",
        "apex.amp._amp_state._amp_state.loss_scalers": "apex.amp._amp_state.loss_scalers",
        "apex.parallel.LARC.LARC": "apex.parallel.LARC",
        "apex.amp.init().wrap_optimizer": "apex.amp._amp_state.handle.wrap_optimizer",
        "?.optimizer._amp_stash.fp16_groups": "optimizer._amp_stash.fp16_groups",
        "apexes.amp": "apexes.amp",
    }
    assert {written: inventory.canonical(written) for written in canonical} == canonical


def test_a_name_that_is_nearly_right_is_recognised():
    assert inventory.similar("apex.amp.scale_los") == "apex.amp.scale_loss"
    assert inventory.similar("apex.parallel.DistributedDataParalel") == "apex.parallel.DistributedDataParallel"
    assert inventory.similar("apex.amp.xyz") is None


def test_a_module_under_the_name_of_an_object_gives_its_own_names_as_well():
    assert inventory.resolve("apex.amp._amp_state") is amp._amp_state
    assert callable(inventory.resolve("apex.amp._amp_state.maybe_print"))


def _is_borrowed(value):
    """True if a name of a package is there only because the package imported it for its own work."""
    if inspect.ismodule(value):
        return not value.__name__.startswith("amp_engine.apex.")
    module = getattr(value, "__module__", None) or ""
    return not module.startswith("amp_engine")
