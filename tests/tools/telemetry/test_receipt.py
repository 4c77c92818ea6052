"""`amp.receipt()`: each section against what is counted here by other means, and that it changes nothing."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from amp_engine import Engine, amp, kernels
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.optimizers import FusedAdam, FusedLAMB
from amp_engine.scaling.history import Point
from amp_engine.tools.explanation import Explanation
from amp_engine.tools.telemetry.receipt import Receipt, receipt
from amp_engine.tools.telemetry.receipt.losses import Loss, Overflows
from amp_engine.tools.telemetry.receipt.models import Model
from amp_engine.tools.telemetry.receipt.shapes import Shape
from amp_engine.tools.telemetry.update_audit import UpdateAudit
from tests.models import CNN, LSTM, MLP, NORMED_MLP, TRANSFORMER, Mlp, NormedMlp
from tests.support import (
    CAST_LEVELS,
    DYNAMIC_LEVELS,
    FUNCTION_LEVELS,
    HALF,
    LEVELS,
    MASTER_LEVELS,
    WEIGHT_DTYPE,
    backward,
    left_alone,
    started,
    train,
)

CPU = torch.device("cpu")
EVIL = "<script>alert('&amp;')</script>"


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-4)  # which float16 holds


def memory_of(found: Receipt) -> dict[str, int]:
    return {one.kind: one.bytes for one in found.memory}


def elements(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


def made(engine: Engine, model: nn.Module, level: str, **keywords: Any) -> Receipt:
    engine.initialize(model, opt_level=level, verbosity=0, **keywords)
    return receipt(engine)


def sizes(*shapes: tuple[str, str, str, int, int]) -> tuple[Shape, ...]:
    return tuple(Shape(*shape) for shape in shapes)


# --- what was asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_as_it_comes_has_no_overrides(level: str) -> None:
    with Engine() as engine:
        found = made(engine, Mlp(), level)
        assert engine.policy is not None
        assert (found.asked.level, found.title) == (level, f"amp receipt: Mlp at {level}")
        values = {p.name: p.value for p in found.asked.properties}
        expected = {name: str(value) for name, value in engine.policy.properties().items()}
        assert {name: values[name] for name in expected} == expected
        assert not any(p.is_override for p in found.asked.properties)


@pytest.mark.parametrize("level", LEVELS)
def test_skip_on_overflow_is_said_where_it_decides(level: str) -> None:
    with Engine() as engine:
        values = {p.name: p.value for p in made(engine, Mlp(), level).asked.properties}
        assert values.get("skip_on_overflow") == (
            None if level in ("O1", "O2") else "auto" if level in ("O4", "O5") else "False"
        )


def test_overrides_are_told_from_what_the_level_says() -> None:
    with Engine() as engine:
        found = made(engine, NormedMlp(), "O2", loss_scale=64.0, keep_batchnorm_fp32=False, num_losses=3)
        overrides = {p.name: (p.value, p.default) for p in found.asked.properties if p.is_override}
        assert overrides == {
            "loss_scale": ("64.0", "dynamic"),
            "keep_batchnorm_fp32": ("False", "True"),
            "num_losses": ("3", "1"),
        }
        assert "the level alone: dynamic" in str(found)


OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[str, str]]]] = {
    "moments": ("O1", {"moment_dtype": torch.bfloat16}, {"moment_dtype": ("torch.bfloat16", "torch.float32")}),
    "codes": ("O5", {"moment_dtype": "8bit"}, {"moment_dtype": ("8bit", "torch.float32")}),
    "half gradients": ("O2", {"gradients": "half"}, {"gradients": ("half", "float32")}),
    "released": ("O5", {"release_gradients": True}, {"release_gradients": ("True", "False")}),
    "on the CPU": ("O5", {"masters_on": "cpu"}, {"masters_on": ("cpu", "None")}),
}


@pytest.mark.skipif(not kernels.has_native(CPU), reason="only compiled kernels take these options")
@pytest.mark.parametrize("options", OPTIONS)
def test_options_beside_the_level_are_overrides_in_the_receipt_and_in_the_first_lines(
    options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    level, given, expected = OPTIONS[options]
    with Engine() as engine:
        model = Mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        engine.initialize(model, optimizer, opt_level=level, **given)
        ((name, (value, _)),) = expected.items()
        assert f"Overrides:  {name}={value}" in capsys.readouterr().out.splitlines()
        overrides = {p.name: (p.value, p.default) for p in receipt(engine).asked.properties if p.is_override}
        assert overrides == expected


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_and_buffers_are_counted_by_type(level: str) -> None:
    with Engine() as engine:
        model = NormedMlp()
        (one,) = made(engine, model, level).models
        for kind, tensors in (("parameters", list(model.parameters())), ("buffers", list(model.buffers()))):
            for dtype in {t.dtype for t in tensors}:
                (row,) = [t for t in one.types if (t.kind, f"torch.{t.dtype}") == (kind, str(dtype))]
                of_type = [t for t in tensors if t.dtype is dtype]
                assert (row.tensors, row.elements) == (len(of_type), elements(of_type))
                assert row.bytes == sum(t.element_size() * t.numel() for t in of_type)
        assert sum(t.elements for t in one.types) == elements([*model.parameters(), *model.buffers()])


def test_a_parameter_under_two_names_counts_once() -> None:
    with Engine() as engine:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        found = made(engine, model, "O2")
        assert [(t.tensors, t.elements) for t in found.models[0].types] == [(1, 64)]
        assert memory_of(found)["parameters"] == 2 * 64


def reasons(model: Model) -> dict[str, set[tuple[str | None, str]]]:
    found: dict[str, set[tuple[str | None, str]]] = {}
    for one in model.kept:
        found.setdefault(one.module, set()).add((one.dtype, one.why))
    return found


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_what_stays_in_fp32_is_named_with_its_reason(level: str) -> None:
    with Engine() as engine:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        amp.keep_float(model[2])
        model.add_module("tied", nn.Linear(4, 4, bias=False))
        model[3].weight = model[2][0].weight  # type: ignore[union-attr,index]
        found = reasons(made(engine, model, level).models[0])
        assert found == {
            "1": {("float32", "batch norm, by keep_batchnorm_fp32=True"), ("int64", "not floating point")},
            "2.0": {("float32", "amp.keep_float")},
            "tied": {("float32", "shared with 2.0, which is kept")},
        }
        model.append(nn.Linear(4, 4))
        later = reasons(receipt(engine).models[0])["4"]
        assert [why.startswith("in this type since initialize") for _, why in later] == [True]


def test_without_keep_batchnorm_fp32_nothing_floating_is_kept() -> None:
    with Engine() as engine:
        assert reasons(made(engine, NormedMlp(), "O3").models[0]) == {"1": {("int64", "not floating point")}}


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_where_functions_are_cast_kept_modules_are_named_whole(level: str) -> None:
    with Engine() as engine:
        model = Mlp()
        amp.keep_float(model[2])
        (kept,) = made(engine, model, level).models[0].kept
        assert (kept.module, kept.class_name, kept.elements) == ("2", "Linear", elements(model[2].parameters()))
        assert kept.why.startswith("amp.keep_float")


def test_several_models_are_told_apart() -> None:
    with Engine() as engine:
        models = [Mlp(), nn.Linear(3, 8)]
        engine.initialize(models, opt_level="O2", verbosity=0)
        found = receipt(engine)
        assert [(m.name, m.class_name) for m in found.models] == [("models[0]", "Mlp"), ("models[1]", "Linear")]
        assert [s.module for s in found.shapes.found] == ["models[0].2", "models[1]"]


# --- functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_levels_that_cast_models_say_that_no_function_is_cast(level: str) -> None:
    with Engine() as engine:
        functions = made(engine, Mlp(), level).functions
        assert (functions.dtype, functions.ops) == (None, None)
        assert f"not on at {level}" in functions.note


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_without_an_explanation_it_says_how_to_get_one_and_collects_none(level: str) -> None:
    with Engine() as engine:
        found = made(engine, Mlp(), level)
        assert f"torch.{found.functions.dtype}" == str(HALF[level])
        assert found.functions.ops is None
        assert "\n\n      with amp.explain() as explanation:\n          ...  # one iteration\n" in str(found)
        assert engine.function_casts.casts is not None
        assert not engine.function_casts.casts.is_observed


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_an_explanation_becomes_a_table_of_functions_and_types(level: str) -> None:
    amp.initialize(Mlp(), opt_level=level, verbosity=0)
    with amp.explain() as explanation:
        F.linear(torch.ones(2, 4), torch.ones(4, 4))
        torch.ones(2) + torch.ones(2, dtype=HALF[level])
        torch.ones(2) + torch.ones(2)
        torch.ones(2, dtype=HALF[level]) + torch.ones(2, dtype=HALF[level])
    found = amp.receipt(explanation)
    assert found.functions.ops is not None
    assert [*found.functions.ops] == explanation.records
    lines = [line.split() for line in str(found).splitlines()]
    half = str(HALF[level]).removeprefix("torch.")
    assert ["function", "list", half, "float32", "casts", "cached", "bytes", "moved"] in lines
    assert ["torch.Tensor.__add__", "promote", "1", "2", "1", "0", "12"] in lines
    assert ["total", "2", "2", "3", "0", f"{24 * 6 + 12}"] in lines


def test_users_changes_of_the_lists_are_named() -> None:
    with Engine() as engine:
        engine.initialize(Mlp(), opt_level="O1", verbosity=0)
        engine.function_casts.register(amp.Registration("float", F, "linear"))
        engine.function_casts.unregister(F, "softmax")
        assert receipt(engine).functions.changes == (
            "registered as float: torch.nn.functional.linear",
            "taken off its list: torch.nn.functional.softmax",
        )


def test_other_objects_are_refused() -> None:
    amp.initialize(Mlp(), opt_level="O1", verbosity=0)
    with pytest.raises(AmpTypeError, match=r"amp\.explain\(\)"):
        amp.receipt({})  # type: ignore[arg-type]
    with pytest.raises(AmpTypeError, match=r"amp\.step_times\(\)"):
        amp.receipt(times=1.0)  # type: ignore[arg-type]
    with pytest.raises(AmpTypeError, match=r"gradients is what amp\.gradient_histogram\(step_fn\) gives, not a list"):
        amp.receipt(gradients=[])  # type: ignore[arg-type]
    with pytest.raises(AmpTypeError, match=r"updates is what `with amp\.audit_updates\(optimizer\) as audit:` gives"):
        amp.receipt(updates=3)  # type: ignore[arg-type]


# --- optimizers and loss scale --------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_skips_and_the_history_of_the_scale(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, make=adamw, task=MLP, engine=engine, loss_scale="dynamic")
        first = engine.scalers[0].loss_scale()
        train(MLP, model, optimizer, "cococc", engine=engine)
        found = receipt(engine)
        points = Point(0, first, 0), Point(2, first / 2, 1), Point(4, first / 4, 1)
        assert found.losses == (Loss(0, True, first / 4, 6, 2, points, (Overflows("backward", 2, (2, 4)),)),)
        (one,) = found.optimizers
        assert (one.class_name, one.steps, one.skips, one.skips_in_a_row) == ("AdamW", 6, 2, 0)
        train(MLP, model, optimizer, "oo", engine=engine)
        assert receipt(engine).optimizers[0].skips_in_a_row == 2
        assert "the last 2 in a row" in str(receipt(engine))


@pytest.mark.parametrize(("loss_scale", "kind"), [("auto", "auto"), ("dynamic", "dynamic"), (128.0, "static")])
def test_each_scale_has_its_kind(loss_scale: float | str, kind: str) -> None:
    with Engine() as engine:
        started("O2", make=adamw, task=MLP, engine=engine, loss_scale=loss_scale)
        assert f"loss_id 0: {kind}, now " in str(receipt(engine))


def test_the_causes_of_overflows_are_counted_each_backward_once() -> None:
    with Engine() as engine:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        engine.initialize(model, optimizers, opt_level="O2", verbosity=0)
        for index in range(9):
            x = torch.full((2, 4), float("nan") if index == 3 else 1.0)
            with engine.scale_loss(model(x).float().mean(), optimizers) as scaled_loss:
                scaled_loss.backward()
                if index > 1 and index != 3:
                    model[1].weight.grad[0, 0] = float("inf")
            for one in optimizers:
                one.step()
                one.zero_grad()
            model.zero_grad()
        found = receipt(engine)
        assert found.losses[0].causes == (Overflows("backward", 6, (5, 6, 7, 8, 9)), Overflows("data", 1, (4,)))
        assert "  causes: 6 backward (backwards ..., 5, 6, 7, 8, 9), 1 data (backward 4)\n" in str(found)


def test_levels_that_look_at_no_gradient_say_so() -> None:
    with Engine() as engine:
        model, optimizer = started("O0", task=MLP, engine=engine)
        train(MLP, model, optimizer, "cc", engine=engine)
        found = receipt(engine)
        assert found.losses == (Loss(0, False, 1.0, 0, 0, (Point(0, 1.0, 0),)),)
        assert (found.optimizers[0].by, found.optimizers[0].steps) == ("its own class", 2)
        assert "no backward was looked at" in str(found)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_what_steps_an_optimizer_is_what_did(level: str) -> None:
    native = "compiled kernels" if kernels.has_native(CPU) else "its own class"
    for make, by in (
        (adamw, native),
        (lambda params: FusedAdam(params, lr=1e-3), "compiled kernels"),
        (lambda params: FusedLAMB(params, lr=1e-3), "compiled kernels"),
        (lambda params: torch.optim.RMSprop(params), "its own class"),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), "its own class"),
    ):
        with Engine() as engine:
            model, optimizer = started(level, make=make, task=MLP, engine=engine)
            before = receipt(engine).optimizers[0]
            train(MLP, model, optimizer, "c", engine=engine)
            after = receipt(engine).optimizers[0]
            assert (before.by, after.by) == (by, by), type(optimizer)
            assert before.why == after.why
            assert after.masters == "4 FP32 masters"


def test_gradients_that_the_kernels_did_not_take_are_told_after_the_step() -> None:
    with Engine() as engine:
        model = nn.Embedding(8, 8, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level="O1", verbosity=0)
        backward(model(torch.tensor([1])).sum(), optimizer, engine=engine)
        found = receipt(engine)
        assert memory_of(found)["gradients"] == 8 + 8 * 4, "of a sparse one its index and its values"
        optimizer.step()
        assert receipt(engine).optimizers[0].by == "its own class"


def test_split_masters_and_narrow_moments_are_named() -> None:
    with Engine() as engine:
        model, optimizer = started(
            "O5", make=adamw, task=MLP, engine=engine, master_weights="split", moment_dtype=torch.bfloat16
        )
        train(MLP, model, optimizer, "c", engine=engine)
        found, count = receipt(engine), elements(model.parameters())
        assert found.optimizers[0].masters == "4 split masters, moments in bfloat16"
        memory = memory_of(found)
        assert memory["remainders of split masters"] == 2 * count
        assert memory["optimizer state"] == 2 * 2 * count + 4 * 4, "two moments, and a count for each of four tensors"
        assert "FP32 masters" not in memory


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_memory_is_counted_by_class(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, make=adamw, task=NORMED_MLP, engine=engine)
        train(NORMED_MLP, model, optimizer, "cc", engine=engine)
        optimizer.zero_grad()
        memory = memory_of(receipt(engine))
        low = [p for p in model.parameters() if p.dtype is not torch.float32]
        count, width = elements(model.parameters()), WEIGHT_DTYPE[level].itemsize
        norm = 0 if level == "O3" else elements(model[1].parameters())  # type: ignore[index]
        assert memory.pop("parameters") == width * (count - norm) + 4 * norm
        assert memory.pop("buffers") == (2 if level == "O3" else 4) * 2 * 16 + 8
        assert memory.pop("optimizer state") == (width if level == "O3" else 4) * 2 * count + 4 * 5
        assert memory.pop("FP32 masters", 0) == (4 * elements(low) if level in MASTER_LEVELS else 0)
        smallest = min(p.numel() for p in model.parameters())  # whose gradient of 0 is there for `model.zero_grad()`
        assert memory.pop("gradients", 0) <= (width * smallest if level in MASTER_LEVELS else 0)
        assert {kind for kind in memory if not kind.startswith("weight copies")} == set()


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_the_moment_are_counted_and_none_is_made(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, task=MLP, engine=engine)
        backward(MLP.loss(model, MLP.batch(0)), optimizer, engine=engine)
        grads = [param.grad for param in model.parameters()]
        for _ in range(2):
            assert memory_of(receipt(engine))["gradients"] == sum(grad.nbytes for grad in grads)
        assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
        if level in MASTER_LEVELS:
            for master in engine.master_params(optimizer):
                assert master.grad is not None  # the model's, in FP32
            assert memory_of(receipt(engine))["gradients"] == 4 * elements(model.parameters())


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_copies_of_weights_are_counted(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, make=adamw, task=MLP, engine=engine)
        train(MLP, model, optimizer, "cc", engine=engine)
        loss = MLP.loss(model, MLP.batch(0))
        assert memory_of(receipt(engine))["weight copies"] == 2 * elements(model.parameters())
        del loss


def test_memory_that_two_share_counts_once() -> None:
    with Engine() as engine:
        model = nn.Linear(8, 8, bias=False)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2)]
        engine.initialize(model, optimizers, opt_level="O1", verbosity=0)
        backward(model(torch.ones(1, 8)).sum(), optimizers, engine=engine)
        memory = memory_of(receipt(engine))
        assert (memory["parameters"], memory["gradients"]) == (4 * 64, 4 * 64)


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "O0"])
def test_dimensions_that_are_no_multiple_of_8_are_found_where_the_level_computes_in_half(level: str) -> None:
    with Engine() as engine:
        found = made(engine, Mlp(), level).shapes
        assert found.audited == 2
        assert found.found == sizes(("2", "Linear", "out_features", 4, 8))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_kind_of_module_is_looked_at(level: str) -> None:
    with Engine() as engine:
        model = nn.ModuleDict(
            {
                "conv": nn.Conv2d(3, 16, 3),
                "transposed": nn.ConvTranspose1d(16, 12, 2),
                "grouped": nn.Conv2d(24, 16, 1, groups=2),
                "depthwise": nn.Conv2d(10, 10, 3, groups=10),
                "attention": nn.MultiheadAttention(24, 2, kdim=9),
                "lstm": nn.LSTM(5, 16, proj_size=3),
                "cell": nn.GRUCell(8, 15),
                "words": nn.Embedding(30_522, 10),
                "norm": nn.LayerNorm(3),
            }
        )
        found = made(engine, model, level).shapes
        words = (
            sizes(("words", "Embedding", "embedding_dim", 10, 16)) if level == "O2" else ()
        )  # O1 looks it up in FP32
        assert (found.audited, found.found) == (
            6 + len(words),
            (
                *sizes(
                    ("conv", "Conv2d", "in_channels", 3, 8),
                    ("transposed", "ConvTranspose1d", "out_channels", 12, 16),
                    ("grouped", "Conv2d", "in_channels of a group", 12, 16),
                    ("attention", "MultiheadAttention", "embed_dim / num_heads", 12, 16),
                    ("attention", "MultiheadAttention", "kdim", 9, 16),
                    ("lstm", "LSTM", "input_size", 5, 8),
                    ("lstm", "LSTM", "proj_size", 3, 8),
                    ("cell", "GRUCell", "hidden_size", 15, 16),
                ),
                *words,
            ),
        )


def test_equal_dimensions_of_many_modules_are_one_line() -> None:
    with Engine() as engine:
        model = nn.Sequential(*(nn.Linear(12, 16) for _ in range(5)), nn.Linear(16, 3))
        found = made(engine, model, "O2")
        assert [shape.module for shape in found.shapes.found] == ["0", "1", "2", "3", "4", "5"]
        lines = [line.strip() for line in str(found).splitlines()]
        first = lines.index("Linear: in_features = 12, pad to 16")
        assert lines[first + 1] == "0, 1, 2, 3 and 1 more"
        assert lines[first + 2 : first + 4] == ["Linear: out_features = 3, pad to 8", "5"]
        assert "5 modules" in Tags(found._repr_html_()).words


def test_what_is_kept_in_fp32_is_not_audited() -> None:
    for level in ("O1", "O2"):
        with Engine() as engine:
            model = Mlp()
            amp.keep_float(model[2])
            assert made(engine, model, level).shapes.found == ()
    with Engine() as engine:
        assert made(engine, Mlp(), "O0").shapes.audited == 0


@pytest.mark.usefixtures("one_process_group")
def test_shards_are_counted_and_audited_as_what_they_are_gathered_to() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=amp.fsdp_policy("O5"))
    fully_shard(model, mesh=mesh, mp_policy=amp.fsdp_policy("O5", root=True))
    optimizer = adamw(model.parameters())
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level="O5", verbosity=0)
        backward(model(torch.ones(2, 8)).sum(), optimizer, engine=engine)
        optimizer.step()
        found, count = receipt(engine), elements(model.parameters())
        assert {why.split(":")[0] for kept in reasons(found.models[0]).values() for _, why in kept} == {"an FP32 shard"}
        memory = memory_of(found)
        assert (memory["parameters"], memory["gradients"]) == (4 * count, 4 * count)
        assert [(shape.dimension, shape.size) for shape in found.shapes.found] == [("out_features", 3)]


def test_text_is_a_hundred_wide_where_names_allow() -> None:
    assert max(map(len, str(trained("O2")).splitlines())) <= 100


# --- the record -----------------------------------------------------------------------------------


def trained(level: str, task: Any = NORMED_MLP) -> Receipt:
    """A receipt with every section filled that the level has."""
    with Engine() as engine:
        model, optimizer = started(level, make=adamw, task=task, engine=engine)
        with engine.explain() as explanation, amp.step_times() as times:
            train(task, model, optimizer, "coc", engine=engine)
        return receipt(engine, explanation, times)


@pytest.mark.parametrize("level", LEVELS)
def test_json_holds_all_of_it(level: str) -> None:
    found = trained(level)
    fields = json.loads(found.to_json())
    assert list(fields) == ["format", "verdict", *(field.name for field in dataclasses.fields(Receipt))]
    assert fields["asked"]["level"] == level
    assert {one["dtype"] for one in fields["functions"]["ops"]} <= {"float16", "bfloat16", "float32", None}
    assert sum(one["bytes"] for one in fields["memory"]) == sum(one.bytes for one in found.memory)


def test_an_audit_of_updates_has_a_section() -> None:
    with Engine() as engine:
        model, optimizer = started("O2", make=adamw, engine=engine)
        with UpdateAudit(engine, optimizer) as audit:
            train(NORMED_MLP, model, optimizer, "coc", engine=engine)
        found = receipt(engine, updates=audit)
    assert found.updates is not None
    assert json.loads(found.to_json())["updates"]["tensors"][0]["name"] == found.updates.tensors[0].name
    assert found.updates.is_well
    assert {one.name for one in found.updates.tensors} == {name for name, _ in NORMED_MLP.model(0).named_parameters()}
    assert "Updates\n  NormedMlp, AdamW, lr " in str(found)
    assert "\n  All is well" in str(found)
    assert "amp.receipt(updates=audit)" in str(dataclasses.replace(found, updates=None))


def test_files_are_written_by_their_suffix(tmp_path: Path) -> None:
    found = trained("O2")
    for name, text in (("a.txt", f"{found}\n"), ("a.json", found.to_json())):
        found.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == text
    found.save(str(tmp_path / "a.HTML"))
    assert (tmp_path / "a.HTML").read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(AmpValueError, match=r"\.txt, \.json or \.html.*run\.html"):
        found.save(tmp_path / "run.pdf")
    assert not (tmp_path / "run.pdf").exists()


def test_it_begins_with_skips_what_steps_memory_and_updates() -> None:
    model, optimizer = started("O5")
    parameters = sum(p.numel() for p in model.parameters())
    with amp.audit_updates(optimizer) as audit:
        train(NORMED_MLP, model, optimizer, "coc")
    page = amp.receipt(updates=audit)
    used = sum(one.bytes for one in page.memory)
    skips, stepped, memory, updates = page.verdict
    assert skips == "1 of 3 steps skipped."
    by = "compiled kernels" if kernels.has_native(torch.device("cpu")) else "its own class"
    assert stepped == f"SGD: stepped by {by}."
    assert memory.endswith(f" in all, {used / parameters:.1f} bytes a parameter.")
    assert updates.startswith("All is well")
    assert str(page).splitlines()[3:5] == ["Verdict", f"  {skips}"]
    assert tuple(json.loads(page.to_json())["verdict"]) == page.verdict


def test_before_initialize_and_after_close_it_says_what_to_type() -> None:
    for _ in range(2):
        with pytest.raises(
            AmpStateError, match=r"amp\.initialize\(model, optimizer, opt_level=\.\.\.\).*before amp\.close"
        ):
            amp.receipt()
        amp.initialize(Mlp(), opt_level="O2", verbosity=0)
        amp.receipt()
        amp.close()


def test_where_amp_does_nothing_it_says_that() -> None:
    amp.initialize(Mlp(), enabled=False)
    found = amp.receipt()
    assert "enabled=False" in str(found)
    assert (found.models, found.memory, found.losses) == ((), (), ())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("task", [NORMED_MLP, CNN, LSTM, TRANSFORMER], ids=lambda task: type(task.model(0)).__name__)
def test_a_receipt_changes_nothing(level: str, task: Any) -> None:
    losses = []
    for is_looked_at in (False, True):
        with Engine() as engine:
            model, optimizer = started(level, make=adamw, task=task, engine=engine)
            for i in range(3):
                loss = task.loss(model, task.batch(i))
                if is_looked_at:
                    receipt(engine)
                backward(loss, optimizer, engine=engine)
                if is_looked_at:
                    with left_alone(model):
                        receipt(engine)
                optimizer.step()
                optimizer.zero_grad()
                if is_looked_at:
                    with left_alone(model, optimizer):
                        str(receipt(engine))
                losses.append(loss.item())
    assert losses[:3] == losses[3:]


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_a_receipt_keeps_the_copies_of_weights(level: str) -> None:
    def casts_of_a_forward(is_looked_at: bool) -> int:
        with Engine() as engine:
            model, optimizer = started(level, make=adamw, task=MLP, engine=engine)
            train(MLP, model, optimizer, "cc", engine=engine)
            if is_looked_at:
                receipt(engine)
            with engine.explain() as explanation:
                MLP.loss(model, MLP.batch(0))
            return sum(record.casts for record in explanation.records)

    assert casts_of_a_forward(True) == casts_of_a_forward(False)


# --- HTML -----------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Asserts that what is opened is closed, and keeps what is in it."""

    VOID = ("meta", "wbr", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.seen)


def page_of(found: Receipt, folder: Path) -> Tags:
    found.save(folder / "page.html")
    return Tags((folder / "page.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("level", LEVELS)
def test_the_page_is_whole_and_loads_nothing(level: str, tmp_path: Path) -> None:
    found = trained(level)
    page = page_of(found, tmp_path)
    assert page.count("html") == page.count("body") == 1
    assert not {tag for tag, _ in page.seen} & {"script", "link", "img", "iframe", "object"}
    assert {name for _, attrs in page.seen for name in attrs if name.startswith("on") or name == "src"} == set()
    assert "url(" not in page.words
    assert "@import" not in page.words
    moves = len(found.losses[0].history) > 1
    assert ("scale after backward (!: overflow)" in page.words) == moves == (level in (*DYNAMIC_LEVELS, "O4", "O5"))


def test_names_are_never_markup(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    Odd.__name__ = EVIL
    model = Odd()
    model.add_module(EVIL.replace(".", ""), nn.Linear(3, 3))
    model.add_module("kept", amp.keep_float(Odd()))
    model.kept.register_buffer("some", torch.zeros(1))  # type: ignore[union-attr,operator]
    with Engine() as engine:
        found = made(engine, model, "O2")
    for text in (found._repr_html_(), str(found)):
        assert "alert" in text
    assert "<script" not in found._repr_html_()
    assert Tags(found._repr_html_()).count("script") == 0
    assert EVIL in page_of(found, tmp_path).words


def test_a_receipt_and_an_explanation_show_themselves_in_a_notebook() -> None:
    with Engine() as engine:
        model, optimizer = started("O1", task=MLP, engine=engine)
        explanation = engine.explain()
        assert "Nothing is explained yet" in Tags(explanation._repr_html_()).words
        with explanation:
            train(MLP, model, optimizer, "c", engine=engine)
        table = Tags(explanation._repr_html_())
        assert table.count("tr") == len(explanation.records) + 2
        assert str(sum(r.calls for r in explanation.records)) in table.words
        found = receipt(engine, explanation)
        assert "amp receipt: Mlp at O1" in Tags(found._repr_html_()).words
        assert repr(found) == str(found)
        assert isinstance(explanation, Explanation)
