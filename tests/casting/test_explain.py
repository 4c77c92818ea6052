"""`amp.explain()` counts calls, casts and bytes by function and type, in all threads, and says why there are none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_engine import Engine, amp
from amp_engine.casting import Explanation
from amp_engine.casting.explanation import Record
from amp_engine.errors import AmpStateError

from ..support import FUNCTION_LEVELS, HALF

X = torch.ones(2, 4)


@pytest.fixture(params=FUNCTION_LEVELS)
def low(request: pytest.FixtureRequest) -> torch.dtype:
    amp.initialize(nn.Linear(1, 1), opt_level=request.param, verbosity=0)
    return HALF[request.param]


def only(explanation: Explanation) -> Record:
    (record,) = explanation.records
    return record


# --- what is counted ------------------------------------------------------------------------------


def test_calls_casts_and_bytes_of_a_function_are_counted(low: torch.dtype) -> None:
    x, w = torch.ones(3, 5), torch.ones(7, 5)
    with amp.explain() as explanation:
        F.linear(x, w)
        F.linear(x.to(low), w)
    expected = (15 + 35) * 6 + 35 * 6  # 4 bytes read, 2 written
    assert explanation.records == [Record("torch.nn.functional.linear", "half", low, 2, 3, 0, expected)]


def test_a_cast_that_the_cache_saved_is_counted_apart(low: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    with amp.explain() as explanation:
        layer(layer(X))
    record = only(explanation)
    assert (record.calls, record.casts, record.cached) == (2, 3, 2)
    assert record.bytes_moved == (X.numel() + 16 + 4) * 6


def test_the_types_that_one_function_ran_in_are_records_of_their_own(low: torch.dtype) -> None:
    half, double = X.to(low), X.double()
    with amp.explain() as explanation:
        X + X
        half + half
        half + X
        half + double
        X.long() + 1
    found = {record.dtype: (record.calls, record.casts, record.bytes_moved) for record in explanation.records}
    assert found == {
        torch.float32: (2, 1, X.numel() * 6),
        low: (1, 0, 0),
        torch.float64: (1, 0, 0),
        None: (1, 0, 0),
    }


CALLS: dict[str, tuple[str, Any]] = {
    "torch.nn.functional.conv1d": ("half", lambda: F.conv1d(torch.ones(1, 1, 4), torch.ones(1, 1, 2))),
    "torch.conv1d": ("half", lambda: torch.conv1d(torch.ones(1, 1, 4), torch.ones(1, 1, 2))),
    "torch.linalg.vector_norm": ("float", lambda: torch.linalg.vector_norm(X)),
    "torch.Tensor.softmax": ("float", lambda: X.softmax(0)),
    "torch.Tensor.__matmul__": ("half", lambda: X @ X.t()),
    "torch.cat": ("promote", lambda: torch.cat([X, X.half()])),
    "torch.Tensor.mul_": ("match_self", lambda: X.clone().mul_(X)),
    "torch.Tensor.exp_": ("refused_in_place", lambda: X.clone().exp_()),
    "torch.log_": ("refused_in_place", lambda: torch.log_(X.clone())),
    "torch.nn.functional.binary_cross_entropy": ("banned", lambda: F.binary_cross_entropy(X, X)),
}


@pytest.mark.usefixtures("low")
@pytest.mark.parametrize("name", CALLS)
def test_a_function_has_the_name_that_it_was_called_by_and_its_list(name: str) -> None:
    listed, call = CALLS[name]
    with amp.explain() as explanation:
        call()
    assert (only(explanation).function, only(explanation).listed) == (name, listed)


@pytest.mark.usefixtures("low")
def test_recurrent_networks_registered_and_decorated_functions_are_seen() -> None:
    amp.register_float_function(torch, "tanh")

    @amp.half_function
    def mine(x: torch.Tensor) -> torch.dtype:
        return x.dtype

    network = nn.LSTM(2, 2)
    with amp.explain() as explanation:
        network(torch.ones(1, 1, 2))
        torch.tanh(X)
        mine(X)
    names = {record.function: record.listed for record in explanation.records}
    assert names.pop("torch._VF.lstm") == "half"
    assert names.pop("torch.tanh") == "float"
    assert names == {f"{__name__}.{mine.__qualname__}": "half"}


def test_functions_on_no_list_and_without_casts_are_not_seen(low: torch.dtype) -> None:
    kept = amp.keep_float(nn.Linear(4, 4))
    with amp.explain() as explanation:
        F.relu(X)
        kept(X)
        with amp.disable_casts():
            F.linear(X, X)
    assert explanation.records == []
    assert "disable_casts" in str(explanation)


# --- where and how long ---------------------------------------------------------------------------


@pytest.mark.usefixtures("low")
def test_nothing_is_observed_before_and_after() -> None:
    casts = amp._amp_state.engine.function_casts.casts
    assert casts is not None
    assert not casts.is_observed
    with amp.explain() as explanation:
        assert casts.is_observed
    assert not casts.is_observed
    with pytest.raises(KeyError), explanation:
        raise KeyError
    assert not casts.is_observed
    F.linear(X, X)
    assert explanation.records == []


@pytest.mark.usefixtures("low")
def test_every_thread_is_seen_and_no_call_is_lost() -> None:
    def run() -> None:
        for _ in range(50):
            F.linear(X, X)

    with amp.explain() as explanation:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (only(explanation).calls, only(explanation).casts) == (200, 400)


@pytest.mark.usefixtures("low")
def test_explanations_nest_and_each_with_starts_anew() -> None:
    with amp.explain() as outer:
        F.linear(X, X)
        with amp.explain() as inner:
            F.linear(X, X)
        F.linear(X, X)
    assert (only(outer).calls, only(inner).calls) == (3, 1)
    with inner, pytest.raises(AmpStateError, match=r"Call amp\.explain\(\)"), inner:
        pass
    assert inner.records == []


def test_initialize_and_register_inside_are_followed() -> None:
    with amp.explain() as explanation:
        amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
        F.linear(X, X)
        amp.register_half_function(torch, "tanh")
        F.linear(X, X)
        torch.tanh(X)
    assert {record.function: record.calls for record in explanation.records} == {
        "torch.nn.functional.linear": 2,
        "torch.tanh": 1,
    }
    assert not amp._amp_state.engine.function_casts.casts.is_observed


def test_an_engine_explains_its_own_casts() -> None:
    with Engine() as engine:
        engine.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
        with engine.explain() as explanation:
            F.linear(X, X)
    assert only(explanation).dtype == torch.float16


def test_verbose_output_goes_on_inside(capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=2)
    capsys.readouterr()
    with amp.explain() as explanation:
        F.linear(X, X)
    assert capsys.readouterr().out.splitlines() == ["Float->Half (linear)"] * 2
    assert only(explanation).casts == 2


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("verbosity", [0, 2])
def test_compiled_code_stays_one_graph_and_is_not_seen(verbosity: int, capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=verbosity)
    capsys.readouterr()
    compiled = torch.compile(lambda x: (F.linear(x, x) @ x).softmax(0), backend="aot_eager", fullgraph=True)
    with amp.explain() as explanation:
        compiled(X)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(X)
    assert explanation.records == []
    assert capsys.readouterr().out == ""


# --- what is said ---------------------------------------------------------------------------------


def test_the_table_is_sorted_by_bytes_then_calls_and_has_totals() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    small, big = torch.ones(2, 2), torch.ones(20, 100)
    with amp.explain() as explanation:
        small + small
        small.mul(small)
        small.mul(small)
        torch.mm(small, small)
        F.linear(big, big)
    assert str(explanation).splitlines() == [
        "function                    list     ran in   calls  casts  cached  bytes moved",
        "-------------------------------------------------------------------------------",
        "torch.nn.functional.linear  half     float16      1      2       0       24,000",
        "torch.mm                    half     float16      1      2       0           48",
        "torch.Tensor.mul            promote  float32      2      0       0            0",
        "torch.Tensor.__add__        promote  float32      1      0       0            0",
        "-------------------------------------------------------------------------------",
        "total                                             5      4       0       24,048",
    ]


def test_before_it_is_entered_it_says_what_to_type() -> None:
    assert "with amp.explain() as explanation:" in str(amp.explain())
    assert amp.explain().records == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (None, "amp.initialize() was not called"),
        ({"enabled": False}, "enabled=False"),
        ({"opt_level": "O0"}, "Function casts are not on at O0; O1 and O4 cast functions."),
        ({"opt_level": "O2"}, "Function casts are not on at O2, which casts the model instead"),
        ({"opt_level": "O5"}, "Function casts are not on at O5, which casts the model instead"),
    ],
    ids=str,
)
def test_an_empty_explanation_says_why(options: dict[str, Any] | None, reason: str) -> None:
    if options is not None:
        amp.initialize(nn.Linear(1, 1), verbosity=0, **options)
    with amp.explain() as explanation:
        F.relu(X)
        assert reason in str(explanation)
    amp.close()
    assert explanation.records == []
    assert reason in str(explanation)


@pytest.mark.parametrize(("level", "half"), [("O0", torch.float32), ("O2", torch.float16), ("O5", torch.bfloat16)])
def test_where_no_function_is_cast_listed_ones_are_told_with_the_type_they_ran_in(
    level: str, half: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
    amp.initialize(model, verbosity=0, opt_level=level)
    with amp.explain() as explanation:
        outputs = model(torch.ones(2, 4))
        F.mse_loss(torch.cat([outputs, outputs]), torch.ones(4, 4))
    assert {(r.function, r.listed, r.dtype, r.calls) for r in explanation.records} == {
        ("torch.nn.functional.linear", "half", half, 1),
        ("torch.nn.functional.layer_norm", "float", half, 1),
        ("torch.cat", "promote", torch.float32, 1),
        ("torch.nn.functional.mse_loss", "float", torch.float32, 1),
    }
    assert all((r.casts, r.cached, r.bytes_moved) == (0, 0, 0) for r in explanation.records)


def test_casts_that_are_installed_meanwhile_tell_of_calls_themselves() -> None:
    amp.initialize(nn.Linear(1, 1), verbosity=0, opt_level="O2")
    with amp.explain() as explanation:
        model = nn.Linear(4, 4)
        amp.initialize(model, verbosity=0, opt_level="O1")
        model(torch.ones(2, 4))
    (record,) = explanation.records
    assert (record.calls, record.casts) == (1, 3)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_step_and_the_exit_of_scale_loss_are_not_told(level: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)  # its step calls mul, norm and sqrt
    amp.initialize(model, optimizer, verbosity=0, opt_level=level)
    with amp.explain() as explanation:
        for factor in (1.0, float("inf")):
            loss = F.linear(torch.ones(2, 4), model.weight.float()).sum() * factor
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            amp.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
    product = "torch.Tensor.__mul__" if level == "O1" else "torch.Tensor.mul"
    assert {(r.function, r.calls) for r in explanation.records} == {
        ("torch.nn.functional.linear", 2),
        ("torch.Tensor.sum", 2),
        (product, 2),
    }
