"""`amp.explain()` counts calls, casts and bytes by function and type, in all threads, at every level."""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine import Engine, amp
from amp_engine.casting import locks
from amp_engine.errors import AmpStateError
from amp_engine.kernels.choice import CASTS
from amp_engine.optimizers import FusedAdam
from amp_engine.tools.explanation import Explanation, Record

from ..support import FUNCTION_LEVELS, HALF, LEVELS

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


@pytest.mark.parametrize("options", [None, {"enabled": False}, *({"opt_level": level} for level in LEVELS)], ids=str)
def test_an_empty_explanation_says_where_calls_are_not_seen(options: dict[str, Any] | None) -> None:
    if options is not None:
        amp.initialize(nn.Linear(1, 1), verbosity=0, **options)
    with amp.explain() as explanation:
        F.relu(X)
        assert "None ran, or none that is seen" in str(explanation)
    amp.close()
    assert explanation.records == []
    assert "None ran, or none that is seen" in str(explanation)


@pytest.mark.parametrize(("level", "half"), [("O0", torch.float32), ("O2", torch.float16), ("O5", torch.bfloat16)])
def test_where_no_function_is_cast_listed_ones_are_told_with_the_type_they_ran_in(
    level: str, half: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Softmax(-1))
    amp.initialize(model, verbosity=0, opt_level=level)
    with amp.explain() as explanation:
        outputs = model(torch.ones(2, 4))
        F.mse_loss(torch.cat([outputs, outputs]), torch.ones(4, 4))
        F.softmax(outputs.bfloat16(), -1, dtype=torch.float32)
        torch.add(X.half(), X.half(), out=torch.empty(2, 4))
    softmaxes = {("torch.nn.functional.softmax", "float", half, 1), ("torch.Tensor.softmax", "float", half, 1)}
    in_float = {(function, listed, torch.float32, 1) for function, listed, _, _ in softmaxes}
    if level == "O0":
        softmaxes, in_float = set(), {(*one[:3], 2) for one in in_float}
    assert {(r.function, r.listed, r.dtype, r.calls) for r in explanation.records} == {
        ("torch.nn.functional.linear", "half", half, 1),
        *softmaxes,
        *in_float,
        ("torch.cat", "promote", torch.float32, 1),
        ("torch.nn.functional.mse_loss", "float", torch.float32, 1),
        ("torch.add", "promote", torch.float16, 1),
    }
    assert all((r.casts, r.cached, r.bytes_moved) == (0, 0, 0) for r in explanation.records)


def counted(explanation: Explanation) -> dict[str, int]:
    found = Counter[str]()
    for record in explanation.records:
        found[record.function] += record.calls
    return dict(found)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x),
        lambda x: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)(x),
        lambda x: nn.LSTM(8, 8, batch_first=True)(x),
        lambda x: torch.utils.checkpoint.checkpoint(nn.Linear(8, 8), x, use_reentrant=False).sum().backward(),
        lambda x: F.gumbel_softmax(x),
        lambda x: x - x,
        lambda x: x[0] @ x[1].T,
    ],
    ids=["attention", "encoder", "lstm", "checkpoint", "gumbel", "minus", "matmul"],
)
def test_a_level_without_casts_counts_the_calls_that_o1_counts(call: Callable[[Tensor], Any]) -> None:
    tables = []
    for level in ("O0", "O1", "O5"):
        amp.initialize(nn.Linear(1, 1), verbosity=0, opt_level=level)
        with amp.explain() as explanation:
            call(torch.randn(2, 3, 8, requires_grad=True))
        amp.close()
        tables.append(counted(explanation))
    assert tables[0] == tables[1] == tables[2] != {}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("level", ["O0", "O5"])
def test_an_explanation_changes_no_result(level: str) -> None:
    """The transformer of eval mode has a path that leaves padding 0, and which modes and casts turn off."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    amp.initialize(model, verbosity=0, opt_level=level)
    inputs, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, True, True]])
    with torch.no_grad():
        expected = model(inputs, src_key_padding_mask=padding)
        with amp.explain():
            assert torch.equal(model(inputs, src_key_padding_mask=padding), expected)
    assert torch.equal(expected[padding], torch.zeros(3, 8))
    with amp.explain():
        X * torch.tensor(2.0, dtype=torch.float8_e5m2)  # of no type that torch promotes them to


def test_an_explanation_sees_no_casts_after_close_and_casts_that_come_meanwhile() -> None:
    model = nn.Linear(4, 4)
    amp.initialize(model, verbosity=0, opt_level="O1")
    model(X)
    amp.close()
    model = nn.Linear(4, 4)
    amp.initialize(model, verbosity=0, opt_level="O5")
    with amp.explain() as explanation:
        model(X.bfloat16())
        (record,) = explanation.records
        assert (record.dtype, record.calls, record.casts) == (torch.bfloat16, 1, 0)
        model = nn.Linear(4, 4)
        amp.initialize(model, verbosity=0, opt_level="O1")
        model(X)
        assert [(r.dtype, r.calls, r.casts) for r in explanation.records] == [
            (torch.float16, 1, 3),
            (torch.bfloat16, 1, 0),
        ]
        amp.close()
        F.linear(X, X)
    assert counted(explanation) == {"torch.nn.functional.linear": 3}


@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_explanations_may_end_in_any_order_and_torch_is_as_it_was(level: str) -> None:
    amp.initialize(nn.Linear(1, 1), verbosity=0, opt_level=level)
    before = F.linear
    first, second = amp.explain(), amp.explain()
    first.__enter__()
    F.linear(X, X)
    second.__enter__()
    F.linear(X, X)
    first.__exit__(None, None, None)
    F.linear(X, X)
    second.__exit__(None, None, None)
    with suppress(KeyError), first:
        F.linear(X, X)
        F.linear(X, X)
        raise KeyError
    F.linear(X, X)
    assert [counted(one) for one in (first, second)] == [{"torch.nn.functional.linear": 2}] * 2
    assert F.linear is before


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
    assert counted(explanation) == {"torch.nn.functional.linear": 2, "torch.Tensor.sum": 2, "torch.Tensor.__mul__": 2}


@pytest.mark.parametrize("level", ["O0", "O4"])
@pytest.mark.parametrize("make", [functools.partial(torch.optim.LBFGS, max_iter=1), FusedAdam, torch.optim.SGD])
def test_forwards_in_a_closure_and_of_averages_are_told(
    make: Callable[[Any], torch.optim.Optimizer], level: str
) -> None:
    model = nn.Linear(4, 1)
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, verbosity=0, opt_level=level)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), torch.ones(2, 1))
        loss.backward()
        return loss

    with amp.explain() as explanation:
        optimizer.step(closure)
    assert counted(explanation) == {"torch.nn.functional.linear": 1, "torch.nn.functional.mse_loss": 1}
    with amp.explain() as explanation, torch.no_grad():
        torch.optim.swa_utils.AveragedModel(model)(X)
        amp.averaged_model(model)(X)
    assert counted(explanation) == {"torch.nn.functional.linear": 2}


@pytest.mark.skipif(CASTS is None, reason="the wrappers are not compiled (python -m amp_engine info)")
def test_compiled_wrappers_never_cast_for_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds at the end of an explanation as well, when no observer is left and torch is still patched."""
    seen, put_in_force = [], CASTS.put_in_force
    monkeypatch.setattr(CASTS, "put_in_force", lambda *args: (put_in_force(*args), seen.append(F.linear(X, X).dtype)))
    with amp.explain():
        F.linear(X, X)
    assert set(seen) == {torch.float32}


def test_threads_that_enter_at_once_are_both_told() -> None:
    entered, left = threading.Barrier(3), threading.Barrier(3)
    explanations = [amp.explain() for _ in range(2)]

    def explain(explanation: Explanation) -> None:
        with explanation:
            entered.wait()
            left.wait()

    threads = [threading.Thread(target=explain, args=(one,)) for one in explanations]
    with locks.install:  # as another `initialize` has it
        for thread in threads:
            thread.start()
        time.sleep(0.05)
    entered.wait()
    F.linear(X, X)
    left.wait()
    for thread in threads:
        thread.join()
    assert [counted(one) for one in explanations] == [{"torch.nn.functional.linear": 1}] * 2


def test_an_explanation_waits_for_a_thread_that_compiles() -> None:
    before, lock = F.linear, importlib.import_module("torch._dynamo.convert_frame").compile_lock
    explanation = amp.explain()
    thread = threading.Thread(target=explanation.__enter__)
    with lock:
        thread.start()
        time.sleep(0.1)  # in which a thread that did not wait would have patched torch
        assert F.linear is before
    thread.join()
    assert F.linear is not before
    explanation.__exit__(None, None, None)
    assert F.linear is before


def test_steps_are_not_told_whatever_they_are_written_like_and_forwards_in_them_are() -> None:
    class ThroughData(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(-0.1 * p.grad.data)

    class WithoutGradients(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.norm())
            return closure()

    model = nn.Linear(4, 4)
    optimizers = ThroughData(model.parameters()), WithoutGradients(model.parameters())
    amp.initialize(model, optimizers[0], verbosity=0, opt_level="O0")
    with amp.explain() as explanation:
        model(X).mean().backward()
        optimizers[0].step()
        optimizers[1].step(lambda: model(X))
    assert counted(explanation) == {"torch.nn.functional.linear": 2}


def test_subclasses_are_not_asked_for_what_an_explanation_wants_to_know() -> None:
    class Strict(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is linear
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    linear = F.linear
    with amp.explain() as explanation:
        F.linear(X.as_subclass(Strict), X)
    assert counted(explanation) == {"torch.nn.functional.linear": 1}
