"""The post-mortem names the cause, and the module where the overflow began, for ten kinds of layers at four levels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_engine import Engine
from amp_engine.tools.diagnosis import saved_values
from amp_engine.tools.diagnosis.forward_order import name_of
from amp_engine.tools.diagnosis.post_mortem import OverflowRecord, has_exploded
from tests.ranks import on_ranks
from tests.tools.telemetry.plants import LAYERS, BackwardOverflow, Model, Planted, batch

LEVELS = ("O1", "O2", "O4", "O5")


@pytest.fixture(autouse=True)
def closes() -> Iterator[None]:
    """Close the engines of a test's runs."""
    yield
    while Run.open:
        Run.open.pop().close()


class Run:
    """A model in training, into whose third batch something is planted."""

    open: ClassVar[list[Engine]] = []

    def __init__(
        self, level: str, kind: str, *, lr: float = 1e-3, wrap: Any = lambda model: model, **keywords: Any
    ) -> None:
        torch.manual_seed(0)
        self.engine = Engine()
        self.open.append(self.engine)
        self.model = Model(kind)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.engine.initialize(self.model, self.optimizer, opt_level=level, **{"verbosity": 0, **keywords})
        self.wrapped = wrap(self.model)
        self.index = 0
        self.bad = ""
        self.factor = 1.0
        self.batch = batch(0)

    def backward(self, **keywords: Any) -> None:
        x, y = self.batch
        loss = nn.functional.mse_loss(self.wrapped(x).float(), y) * self.factor
        with self.engine.scale_loss(loss, self.optimizer, **keywords) as scaled_loss:
            scaled_loss.backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.batch = batch(self.index, self.bad)
        self.backward()
        self.optimizer.step()
        self.index += 1

    def plant(self, bad: str) -> OverflowRecord:
        """Return the record of a third batch, in which something goes wrong, or of the next one if that is traced."""
        self.step()
        self.step()
        assert len(self.engine.overflow_report()) == 0
        self.bad = self.model.planted.bad = bad
        self.step()
        (record,) = self.engine.overflow_report()
        assert record.is_traced != record.is_checked
        if record.is_checked:
            self.step()
            record = self.engine.overflow_report()[-1]
        return record


def traced(engine: Engine, optimizer: torch.optim.Optimizer, loss_fn: Callable[[], Tensor]) -> OverflowRecord:
    """Return the record of the second of two steps, both of which overflow."""
    for _ in range(2):
        with engine.scale_loss(loss_fn(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = engine.overflow_report()
    assert (first.is_traced, second.is_traced) == (False, True)
    return second


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_backward_that_overflows_is_named(level: str, kind: str) -> None:
    run = Run(level, kind)
    record = run.plant("backward")
    assert record.cause == "backward"
    assert record.module is not None
    assert record.module.startswith("planted.layer")
    assert record.parameter is not None
    parameter = run.model.get_parameter(record.parameter)
    assert (record.elements, record.numel) == (parameter.numel(), parameter.numel())
    assert record.kind in ("inf", "nan")
    assert record.loss_is_finite
    assert record.parameter in str(record)
    assert "backward" in str(record)
    # Everything before it in the forward is not finite either, and nothing behind it.
    assert {name.split(".")[0] for name in record.nonfinite} == {"first", "planted"}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_forward_that_overflows_is_named(level: str, kind: str) -> None:
    record = Run(level, kind).plant("forward")
    assert record.cause == "forward"
    assert record.near is not None
    assert record.near.startswith("planted.layer")
    assert not record.loss_is_finite
    assert record.near in str(record)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_batch_that_is_not_finite_is_named(level: str) -> None:
    record = Run(level, "layer norm", skip_on_overflow=False).plant("data")
    assert record.cause == "data"
    assert record.near is not None
    assert record.near.startswith("first")
    assert "batch" in str(record)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_learning_rate_that_is_too_high_is_divergence(level: str) -> None:
    run = Run(level, "linear", lr=3.0, skip_on_overflow=False)
    for _ in range(60):
        run.step()
    found = [record for record in run.engine.overflow_report() if record.cause == "divergence"]
    assert found
    assert found[0].growth is not None
    assert found[0].growth > 10
    assert "learning rate" in str(found[0])


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_adversarial_batches_for_a_trained_model_are_no_divergence(level: str, every: int) -> None:
    run = Run(level, "linear", lr=0.0, skip_on_overflow=False)
    x, _ = batch(0)
    with torch.no_grad():
        y = run.model(x).float()
    for index in range(40):
        is_adversarial = index >= 20 and index % every == 0
        worse = 0.0 if not is_adversarial else 4e3 if index < 36 else float("inf")
        run.optimizer.zero_grad()
        run.batch = x, y + 1e-2 + worse
        run.backward()
        run.optimizer.step()
    report = run.engine.overflow_report()
    assert report
    assert {record.cause for record in report} <= {"data", "forward", "backward"}
    assert "learning rate" not in "".join(map(str, report))


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_where_no_gradient_is_checked_a_loss_that_is_not_finite_is_said_once(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(level, "linear", skip_on_overflow=False, verbosity=1)
    run.plant("forward")
    for _ in range(3):
        run.step()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Amp post-mortem")]
    assert len(lines) == 1
    assert "forward" in lines[0]
    assert ", at or after planted.layer." in lines[0], "though it is the first: the step spoils the weights"
    assert "Gradients are not checked here, so the step is taken" in lines[0]
    assert not run.engine.overflow_report()[0].skipped


@pytest.mark.filterwarnings("ignore:SGD.step.. finds no gradient")
def test_where_gradients_are_checked_and_none_arrives_no_step_is_said_to_be_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(2, requires_grad=True)
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level="O2", skip_on_overflow=True)
        for _ in range(2):
            with engine.scale_loss((inputs * inputs).sum() * float("inf"), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    output = capsys.readouterr().out
    assert "Amp post-mortem" in output
    assert "not checked here" not in output


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_after_a_loss_that_is_finite_the_next_one_that_is_not_is_said_again(level: str) -> None:
    run = Run(level, "linear", skip_on_overflow=False)
    for index, bad in enumerate(("data", "data", "", "data", "data")):
        run.batch = batch(index, bad)
        run.backward()
    assert [(record.backward, record.cause) for record in run.engine.overflow_report()] == [(1, "data"), (4, "data")]


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_that_is_not_finite_is_named(level: str) -> None:
    run = Run(level, "linear")
    run.step()
    with torch.no_grad():
        for weight in run.engine.master_params(run.optimizer):
            if weight.shape == (8, 4):
                weight[0, 0] = float("nan")
    while not run.engine.overflow_report():  # a step writes masters into the model
        run.step()
    (record,) = run.engine.overflow_report()
    assert record.cause == "weights"
    assert record.weights == ("first.weight",)
    assert record.outgrown == ()


def test_a_finite_master_that_float16_cannot_hold_is_named_with_its_size() -> None:
    run = Run("O2", "linear")
    run.step()
    with torch.no_grad():
        next(iter(run.engine.master_params(run.optimizer)))[0, 0] = -7e4
    while not run.engine.overflow_report():
        run.step()
    (record,) = run.engine.overflow_report()
    assert record.cause == "weights"
    assert record.outgrown == (("last.weight", 7e4),)
    assert "Their FP32 masters are finite, and beyond float16's 65504: last.weight (70000)." in str(record)


def test_every_skip_prints_apexs_line_and_a_cause_is_said_once_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run("O2", "linear", verbosity=1)
    run.plant("backward")
    run.step()
    lines = capsys.readouterr().out.splitlines()
    skips = [i for i, line in enumerate(lines) if line.startswith("Gradient overflow.  Skipping step, loss")]
    assert [lines[skip + 1] for skip in skips[:2]] == [str(record) for record in run.engine.overflow_report()[:2]]
    assert lines[skips[2] + 1 :] == [], "the same cause"
    for _ in range(8):
        run.step()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Amp post-mortem")]
    assert said == ["Amp post-mortem:  backward, at planted.layer.bias, as in each of the last 10 skipped steps."]
    assert len(run.engine.overflow_report()) == 11
    run.model.planted.bad = "forward"
    run.step()
    assert str(run.engine.overflow_report()[11]) in capsys.readouterr().out, "another cause"


@pytest.mark.parametrize("bad", ["backward", "forward"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_first_overflow_says_what_the_check_knows_and_nothing_of_the_graph(level: str, bad: str) -> None:
    run = Run(level, "linear")
    run.plant(bad)
    record = run.engine.overflow_report()[0]
    assert (record.cause, record.loss_is_finite) == (bad, bad == "backward")
    assert (record.operation, record.near, record.why, record.elements) == (None, None, None, None)
    assert str(record).endswith("amp.find_overflow(step_fn) tells where it began; from now on explanations do, too.")
    if bad == "backward":
        assert record.nonfinite == ("planted.layer.weight", "planted.layer.bias", "first.weight", "first.bias")
        assert "4 of 6 gradients are not finite: first.bias, first.weight, planted.layer.bias, planted" in str(record)


@pytest.mark.parametrize("level", LEVELS)
def test_nobody_listens_before_the_first_overflow_nor_after_the_next_initialization(level: str) -> None:
    run = Run(level, "linear")
    events = run.engine.records.events
    run.step()
    assert len(run.engine.overflow_report()) == 0
    assert (events.entered.observers, events.checked.observers) == ((), ())
    run.plant("forward")
    assert len(events.entered.observers) == len(events.checked.observers) == 1
    run.engine.close()
    model = Model("linear")
    run.engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    assert (events.entered.observers, events.checked.observers) == ((), ())
    run.engine.close()


def test_verbosity_2_says_the_cause_of_every_skip(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run("O2", "linear", verbosity=2)
    run.plant("backward")
    run.step()
    assert capsys.readouterr().out.count("Amp post-mortem:  backward.  The gradient of planted.layer.bias") == 2


def causes_under_ddp(rank: int) -> tuple[list[tuple[str, str, str | None]], str]:
    found = []
    for level in LEVELS:
        for bad in ("backward", "forward"):
            run = Run(level, "linear", wrap=DistributedDataParallel)
            record = run.plant(bad)
            where = record.module if bad == "backward" else record.near
            found.append((level, record.cause, where))
            run.engine.close()
    run = Run("O1", "linear", wrap=DistributedDataParallel)
    run.step()
    run.factor = 1e37 if rank == 1 else 1.0
    run.step()
    run.step()
    said = str(run.engine.overflow_report()[1])
    run.engine.close()
    return found, said


def test_ranks_of_ddp_name_the_same() -> None:
    (ours, said), (theirs, _) = on_ranks(causes_under_ddp, 2)
    assert ours == theirs
    assert re.search(r"backward\. .*  Look at rank 1 of 2: its loss is \d\S*e\+3\d, rank 0's 0\.\d+\.$", said)
    for level, cause, where in ours:
        assert where is not None, level
        assert where.startswith("planted.layer"), (level, cause)
    assert [cause for _, cause, _ in ours] == ["backward", "forward"] * len(LEVELS)


class Checkpointed(nn.Module):
    def __init__(self, inner: Planted, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant
        self.bad = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.bad = self.bad
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_checkpointed_part_is_named_and_no_operation_in_it(level: str, reentrant: bool) -> None:
    run = Run(level, "linear")
    run.model.planted = Checkpointed(run.model.planted, reentrant)  # what it saves can be had once, by the backward
    record = run.plant("forward")
    assert record.region is not None
    assert "  The first value that is not finite came from a checkpointed part, between first." in str(record)
    assert (record.region[1] or "").startswith("last.")
    run.model.planted.bad = "backward"
    run.step()
    record = run.engine.overflow_report()[-1]
    assert record.cause == "backward"
    assert bool(record.hidden) == reentrant
    assert "planted.inner.layer.bias" in str(record)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_micro_batch_of_an_accumulation_is_named(level: str, delay: bool) -> None:
    run = Run(level, "linear")
    run.step()
    for _ in range(2):
        for micro in range(4):
            run.batch = batch(micro, "data" if micro == 1 else "")
            run.backward(delay_unscale=delay and micro < 3)
        run.optimizer.step()
        run.optimizer.zero_grad()
    first, record = run.engine.overflow_report()
    assert (record.cause, first.micro_batches, record.micro_batches) == ("data", (2, 2, 4), (2, 2, 4))
    assert "forward.  Micro-batch 2 of 4: the loss is nan" in str(first)
    assert "data.  Micro-batch 2 of 4: the loss is nan" in str(record)
    run.model.planted.bad = "backward"
    run.batch = batch(0)
    for micro in range(3):
        run.backward(delay_unscale=delay and micro < 2)
        run.model.planted.bad = ""
    run.optimizer.step()
    record = run.engine.overflow_report()[2]
    is_one_check = delay or level == "O5"  # at a scale of 1 the step checks
    assert record.micro_batches == ((1, 3, 3) if is_one_check else (1, 1, 3))
    one = "One of micro-batches 1 to 3: the last loss is 1." if is_one_check else "Micro-batch 1 of 3: the loss"
    assert one in str(record)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.bad_at = ""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mid(self.embed(tokens))
        if self.bad_at == "mid":
            x = BackwardOverflow.apply(x)
        x = self.head(x)
        return BackwardOverflow.apply(x) if self.bad_at == "head" else x


@pytest.mark.parametrize("bad_at", ["mid", "head"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_tied_weight_has_the_names_of_both_owners_and_is_not_blamed_alone(level: str, bad_at: str) -> None:
    with Engine() as engine:
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        model.bad_at = bad_at
        record = traced(engine, optimizer, lambda: model(torch.arange(5)).float().sum())
        assert (record.parameter, record.instead) == ("embed.weight = head.weight", "mid.bias")
        assert "The gradient of mid.bias is the first that is not finite, as the backward goes, or that of" in str(
            record
        )


class Scores(nn.Module):
    """Attention that goes wrong: its products overflow, or a mask leaves nothing of a row."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(3, 1)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) * 0.5
        mask = torch.zeros(2, 3, 3, dtype=torch.bool)
        mask[1, 2] = True
        if self.kind == "mask":
            scores = scores.masked_fill(mask, -math.inf)
        if self.kind == "sum":
            scores = scores + torch.zeros_like(scores).masked_fill(mask, -math.inf)
        return self.out(scores.softmax(-1)).float().sum()


@pytest.mark.parametrize("kind", ["products", "mask", "sum"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_softmax_is_not_blamed_for_what_it_was_given(level: str, kind: str) -> None:
    torch.manual_seed(0)
    with Engine() as engine:
        model = Scores(kind)
        if kind == "products":
            with torch.no_grad():
                model.q.bias.fill_(3e3)
                model.k.bias.fill_(3e3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        record = traced(engine, optimizer, lambda: model(torch.ones(2, 3, 4)))
        assert record.cause == "forward"
        assert record.operation == ("bmm" if kind == "products" else "softmax")
        sure, unsure = (
            "which a mask fills with -inf throughout",
            "as where all of a row is -inf, or one of it inf or nan",
        )
        said = {"products": None, "mask": sure, "sum": unsure}[kind]
        assert record.why == (said and f"softmax: nan in 1 of 6 rows, {said}")
        found = engine.find_overflow(lambda: model(torch.ones(2, 3, 4)))
        assert (found.operation, found.masked_rows) == (("bmm", 0) if kind == "products" else ("_softmax", 1))


class Sums(nn.Module):
    """As in a UNet, the convolution overflows, and a linear layer is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.time, self.norm = nn.Conv1d(4, 4, 1), nn.Linear(4, 4), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x) + self.time(x[..., 0])[..., None]).float().sum()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_operand_of_a_sum_that_overflows_is_named(level: str) -> None:
    with Engine() as engine:
        model = Sums()
        with torch.no_grad():
            model.conv.weight.fill_(6e4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        record = traced(engine, optimizer, lambda: model(torch.ones(2, 4, 3)))
        assert (record.operation, record.near, record.is_exact) == ("convolution", "conv.bias", True)


def test_the_report_and_the_history_number_backwards_alike() -> None:
    run = Run("O1", "linear", num_losses=2)
    for index in range(4):
        x, y = batch(index, "data" if index == 2 else "")
        with run.engine.scale_loss(nn.functional.mse_loss(run.model(x), y), run.optimizer, loss_id=index % 2) as scaled:
            scaled.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert [record.backward for record in run.engine.overflow_report()] == [3]
    assert [p.backward for p in run.engine._scaling.history.track(0).points] == [0, 3]
    run.engine.close()
    run.model = run.wrapped = Model("linear")
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.engine.initialize(run.model, run.optimizer, opt_level="O1", verbosity=0)
    run.batch = batch(0, "data")
    run.backward()
    run.optimizer.step()
    assert [record.backward for record in run.engine.overflow_report()] == [1], "from 1 again"


@pytest.mark.parametrize(
    ("loss", "earlier", "is_exploding"),
    [
        (1e6, [1.0], False),
        (1e6, [1.0, 8.0, 200.0], True),
        (float("nan"), [1.0, 1e3, 1e6], True),
        (float("inf"), [2.0, 1.9, 1.8, 1.7], False),
        (1e6, [1.0, 1.1, 0.9, 1.0, 1.0], False),  # one bad batch
        (1e6, [1.0, 1.1, 0.9, 1.0, 5.0, 50.0], True),
        (1e6, [1.0, 1.1, 0.9, 1.0, 5.0, 4.0, 50.0], True),
        (float("inf"), [1e-3] * 20 + [9.0, 11.0, 10.0, 12.0], False),  # adversarial batches for a trained model
        (40.0, [1e-3] * 20 + [9.0, 11.0, 10.0, 12.0], False),
        (float("nan"), [1e-3, 9.0] * 10, False),  # every other batch
        (30.0, [1e-3, 9.0, 2e-3, 12.0, 1e-3], False),
        (float("nan"), [1e-3], False),
        (5.0, [1.0], False),
        (5.0, [], False),
        (None, [1.0, 2.0], False),
        (-1e6, [-1.0, -2.0], False),
        (-1e6, [-1.0, -2.0, -30.0, -900.0], True),
        (float("inf"), [1.0, 0.9, 1.1, 1.0, 1e21, 1e32], False),  # other batches: no step raises it so much at once
        (float("inf"), [1.0, 1e8, 1e21, 1e32], True),
    ],
)
def test_what_counts_as_an_explosion(loss: float | None, earlier: list[float], is_exploding: bool) -> None:
    assert has_exploded(loss, earlier) is is_exploding


def test_the_report_is_a_table_and_keeps_the_newest() -> None:
    run = Run("O2", "linear")
    assert "No backward" in str(run.engine.overflow_report())
    run.plant("backward")
    report = run.engine.overflow_report()
    assert "planted.layer.bias" in str(report)
    assert report._repr_html_().count("<tr>") == 3
    assert len(report) == 2
    assert list(report)[0].skipped
    run.engine.close()
    assert len(run.engine.overflow_report()) == 2  # to be read after the run
    model = Model("linear")
    run.engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert len(run.engine.overflow_report()) == 0


class Residual(nn.Module):
    """Overflows in a product of which nothing is kept: an addition follows."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.tok, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok(x)
        x = x + x.float().mul(self.factor).mul(self.factor)
        x = x.float().sigmoid() * x
        return self.head(x.to(self.head.weight.dtype)).float().square().mean()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_operation_is_named_for_sure_only_if_what_it_was_given_is_known(level: str) -> None:
    torch.manual_seed(0)
    model = Residual(1.0)
    with Engine() as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        for factor in (1.0, 1e30, 1e30):
            model.factor = factor
            with engine.scale_loss(model(torch.ones(2, 4)), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        record = engine.overflow_report()[1]
        assert (record.cause, record.operation, record.is_exact) == ("forward", "add", False)
        assert "add, at or after tok" in str(record)
        assert "or an operation before it, of which nothing was kept" in str(record)
        assert engine.find_overflow(lambda: model(torch.ones(2, 4))).operation == "mul"
        row = str(engine.overflow_report()).splitlines()[-1]
        assert record.near is not None
        assert record.near.startswith("tok.")
        assert record.near in row
        assert "head" not in row


def test_a_batch_that_overflows_no_more_at_the_present_scale_is_nothing_to_mend() -> None:
    run = Run("O1", "linear", loss_scale="dynamic")
    run.engine.scalers[0].scale.fill_(2.0**24)
    while not (report := run.engine.overflow_report()) or run.engine.last_step().skipped:
        run.step()
    assert report[-1].cause == "backward"
    found = run.engine.find_overflow(run.backward)
    assert (found.phase, found.loss_scale) == ("backward", report[-1].loss_scale)
    assert found.finite_at == run.engine.scalers[0].loss_scale() < report[-1].loss_scale
    assert "everything is finite: nothing to do" in str(found)
    run.engine.scalers[0].scale.fill_(2.0**24)
    assert run.engine.find_overflow(run.backward).finite_at is None


WHY = {
    "log of 0": lambda x: x.relu().log(),
    "log of negative numbers": lambda x: (-x.abs() - 1.0).log(),
    "div by 0": lambda x: torch.ones(8) / x.relu(),
    "log1p of numbers below -1": lambda x: (x - x.detach() - 2.0).log1p(),
    "rsqrt of 0": lambda x: x.relu().rsqrt(),
    "reciprocal of 0, or of nearly 0,": lambda x: x.relu().reciprocal(),
    "pow of 0": lambda x: x.relu().pow(-1.5),
    "acos of numbers beyond 1": lambda x: (x.abs() + 2.0).acos(),
    "exp of numbers that are too large": lambda x: (x.abs() + 100.0).exp(),
}


class Head(nn.Module):
    """A linear layer, and a loss that is not finite for what its inputs are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).float()
        return WHY[self.kind](x).sum() * x.sum()


@pytest.mark.parametrize("kind", WHY)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_operation_whose_inputs_tell_is_explained(level: str, kind: str) -> None:
    torch.manual_seed(0)
    with Engine() as engine:
        model = Head(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        x = torch.randn(5, 4)
        zeros = int((model.layer(x.to(model.layer.weight.dtype)).float() <= 0).sum())
        record = traced(engine, optimizer, lambda: model(x))
        bad = zeros if kind.rstrip(",").endswith(" 0") else 40
        assert bad > 0
        assert (record.cause, record.why) == ("forward", f"{kind} in {bad} of 40 elements")
        assert f"  {kind} in {bad} of 40 elements, at or after layer." in str(record)


def test_operations_have_the_names_that_users_write() -> None:
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    nodes = [nn.functional.max_pool2d(x, 2).grad_fn, x.log1p().grad_fn, torch.addmm(x[0, 0], x[0, 0], x[0, 0]).grad_fn]
    assert [name_of(node) for node in nodes if node is not None] == ["max_pool2d_with_indices", "log1p", "addmm"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_frozen_part_that_overflows_is_not_blamed_on_the_batch_alone(level: str) -> None:
    with Engine() as engine:
        model = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 2))
        with torch.no_grad():
            model[0].weight.fill_(6e4)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        record = traced(engine, optimizer, lambda: model(torch.ones(3, 4)).float().sum())
        assert (record.cause, record.untrained) == ("data", ("0.weight", "0.bias"))
        assert "at parameters that are not trained (0.weight, 0.bias), and at models" in str(record)


@pytest.mark.parametrize("kind", ["sqrt of 0", "acos of 1 or -1", ""])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_derivative_that_is_not_finite_is_named_from_the_second_overflow_on(
    level: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine() as engine:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level)
        for _ in range(8):
            x = model(torch.ones(3, 4)).float()
            x = x - x.detach()
            x = x.sqrt() if kind == "sqrt of 0" else (x + 1.0).acos() if kind else x
            loss = x.mean()
            with engine.scale_loss(loss, optimizer) as scaled_loss:
                (scaled_loss * (1.0 if kind else float("inf"))).backward()
            optimizer.step()
            optimizer.zero_grad()
        records = engine.overflow_report()
        why = f"{kind} in 6 of 6 elements" if kind else None
        assert [record.why for record in records] == [None] + [why] * 7
        assert {record.cause for record in records} == {"backward"}
        said = capsys.readouterr().out
        post_mortems, _, diagnosis = said.partition("Amp diagnosis:")
        for text in (post_mortems, diagnosis):
            assert text.count("its derivative is not finite there.  Add an eps inside.") == bool(kind), "once in a row"
        assert ("No scale and no type mends that." in diagnosis) == bool(kind)
        assert ("its derivative is not finite there" in str(records[1])) == bool(kind)


@pytest.mark.parametrize(("dtype", "helps"), [("float16", True), ("bfloat16", False)])
def test_fp32_is_advised_only_for_numbers_that_it_holds(dtype: str, helps: bool) -> None:
    advised = saved_values.advice(f"pow of numbers up to 1e+30, beyond {dtype}, in 1 of 8 elements")
    assert ("FP32" in advised) == helps


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_that_is_not_finite_is_told_in_a_row_and_then_its_origin_though_its_gradients_are_finite(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(level, "linear", verbosity=1)
    report = []
    for is_bad in (False, True, True, False, True):
        run.optimizer.zero_grad()
        y = run.wrapped(run.batch[0]).float()
        loss = nn.functional.mse_loss(y, run.batch[1]) + y[: 0 if is_bad else 1].mean()
        with run.engine.scale_loss(loss, run.optimizer) as scaled_loss:
            scaled_loss.backward()
        run.optimizer.step()
        report.append(len(run.engine.overflow_report()))
    assert report == [0, 1, 2, 2, 3], "the first, and once its origin"
    assert [one.why for one in run.engine.overflow_report()] == [None, "mean of nothing", "mean of nothing"]
    record = run.engine.overflow_report()[0]
    assert (record.cause, record.skipped, record.nonfinite, record.backward) == ("forward", False, (), 2)
    said = "The loss is nan, scaled by 65536.  All gradients are finite, so the step was taken."
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count(said) == 3
    run.engine.close()


def test_a_loss_of_two_optimizers_that_is_not_finite_is_told_once() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    with Engine() as engine:
        engine.initialize(model, optimizers, opt_level="O2", verbosity=0)
        loss = sum(part(torch.ones(1, 4)).float().mean() for part in model) + torch.zeros(0).mean()
        with engine.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert len(engine.overflow_report()) == 1
