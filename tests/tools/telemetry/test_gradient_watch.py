"""`amp.watch_gradients`: what is noted of each gradient is what a plain look at it says."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from amp_engine import Engine
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.tools.telemetry.gradient_watch import KEPT, GradientRecord, GradientWatch
from tests.models import NORMED_MLP, TRANSFORMER
from tests.support import LEVELS, assert_bitwise, backward, optimizer_values, started, train


def by_name(records: list[GradientRecord]) -> dict[str, GradientRecord]:
    return {record.parameter: record for record in records}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("task", [NORMED_MLP, TRANSFORMER], ids=lambda task: task.name)
def test_norm_and_largest_are_those_of_the_unscaled_gradient(level: str, task: object) -> None:
    with Engine() as engine:
        model, optimizer = started(level, task=task, engine=engine)
        with GradientWatch(engine, every=1) as watch:
            backward(task.loss(model, task.batch(0)), optimizer, engine=engine)  # type: ignore[attr-defined]
        found = by_name(watch.records)
        names = [name for name, _ in model.named_parameters()]
        assert list(found) == names
        for name, weight in zip(names, engine.master_params(optimizer), strict=True):
            grad, record = weight.grad, found[name]
            assert grad is not None
            assert record.elements == grad.numel()
            assert record.largest == pytest.approx(float(grad.abs().max()), rel=1e-6)
            assert record.norm == pytest.approx(float(grad.double().norm()), rel=1e-6)
            assert record.zeros == float((grad == 0).double().mean())
            assert record.nonfinite == 0
            assert record.loss_scale == engine.scalers[0].loss_scale()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_shares_are_those_at_the_loss_scale(level: str) -> None:
    model = nn.Linear(64, 1, bias=False)
    # The gradient of each weight is its input.
    x = torch.exp2(torch.linspace(-20, -1, 64)).repeat(1, 1)
    with Engine() as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, loss_scale=2.0**-4, verbosity=0)
        with GradientWatch(engine, every=1) as watch:
            backward(model(x).sum(), optimizer, engine=engine)
        (record,) = watch.records
    scaled = (x.half() * 2.0**-4).half()
    is_zero = scaled == 0
    assert record.zeros == float(is_zero.double().mean())
    assert record.flushed == 0.0, "what was lost is a zero by now"
    assert record.subnormal == float(((scaled < 2.0**-14) & ~is_zero).double().mean())
    assert record.subnormal > 0.2


def test_what_float32_gradients_would_lose_is_flushed() -> None:
    model = nn.Linear(64, 1, bias=False)
    x = torch.exp2(torch.linspace(-40, -1, 64)).repeat(1, 1)
    with Engine() as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level="O0", verbosity=0)
        with GradientWatch(engine, every=1) as watch:
            backward(model(x).sum(), optimizer, engine=engine)
        (record,) = watch.records
        assert record.flushed == float((x < 2.0**-25).double().mean())
        assert record.subnormal == float((x < 2.0**-14).double().mean())
        with GradientWatch(engine, every=1, dtype=torch.bfloat16) as watch:
            backward(model(x).sum(), optimizer, engine=engine)
        assert watch.records[0].subnormal == 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_every_nth_backward_is_looked_at_from_the_first_on(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, engine=engine)
        with GradientWatch(engine, every=3) as watch:
            train(NORMED_MLP, model, optimizer, "cocoooc", engine=engine)
        assert sorted({record.backward for record in watch.records}) == [1, 4, 7]
        assert {record.nonfinite > 0 for record in watch.records if record.backward == 4} == {True}


def test_the_newest_are_kept() -> None:
    with Engine() as engine:
        model, optimizer = started("O5", engine=engine)
        with GradientWatch(engine, every=1) as watch:
            train(NORMED_MLP, model, optimizer, "c" * (KEPT + 3), engine=engine)
        numbers = sorted({record.backward for record in watch.records})
    assert numbers == list(range(4, KEPT + 4))


def test_a_parameter_of_two_optimizers_is_noted_once() -> None:
    model = NORMED_MLP.model(0)
    with Engine() as engine:
        both = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
        engine.initialize(model, both, opt_level="O1", verbosity=0)
        with GradientWatch(engine, every=1) as watch:
            backward(NORMED_MLP.loss(model, NORMED_MLP.batch(0)), both, engine=engine)
        assert [record.parameter for record in watch.records] == [name for name, _ in model.named_parameters()]


def test_sparse_gradients_are_noted() -> None:
    model = nn.Embedding(20, 4, sparse=True)
    with Engine() as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level="O1", verbosity=0)
        with GradientWatch(engine, every=1) as watch:
            backward(model(torch.tensor([1, 1, 3])).sum() * 0.5, optimizer, engine=engine)
        (record,) = watch.records
        assert (record.elements, record.largest) == (8, 1.0)
        assert record.norm == pytest.approx((4 * 1.0 + 4 * 0.25) ** 0.5)


@pytest.mark.parametrize("level", LEVELS)
def test_watching_changes_nothing(level: str) -> None:
    runs = []
    for watches in (False, True):
        with Engine() as engine:
            model, optimizer = started(level, engine=engine)
            if watches:
                with GradientWatch(engine, every=1) as watch:
                    losses = train(NORMED_MLP, model, optimizer, "cocc", engine=engine)
                assert str(watch)
            else:
                losses = train(NORMED_MLP, model, optimizer, "cocc", engine=engine)
            seen = torch.tensor(losses), engine.state_dict(), dict(model.state_dict()), optimizer_values(optimizer)
            runs.append(seen)
    assert_bitwise(runs[0], runs[1])


def test_outside_of_the_with_nobody_looks_and_nothing_is_held() -> None:
    with Engine() as engine:
        model, optimizer = started("O2", engine=engine)
        watch = GradientWatch(engine, every=1)
        with pytest.raises(KeyError), watch:
            raise KeyError
        assert not engine.records.events.closed.observers
        train(NORMED_MLP, model, optimizer, "c", engine=engine)
        assert watch.records == []
        assert "No gradient was looked at" in str(watch)
        with watch:
            train(NORMED_MLP, model, optimizer, "c", engine=engine)
        names = [record.parameter for record in watch.records]
        del model, optimizer
        gc.collect()
        assert engine._initialized.models == []
        assert [record.parameter for record in watch.records] == names


def test_the_table_has_the_newest_backward_and_what_loses_most_first() -> None:
    with Engine() as engine:
        model, optimizer = started("O2", task=TRANSFORMER, engine=engine)
        with GradientWatch(engine, every=1) as watch:
            train(TRANSFORMER, model, optimizer, "cc", engine=engine)
        lines = str(watch).splitlines()
        assert lines[0] == "backward 2, loss scale 65536"
        assert len(lines) == 3 + len(list(model.parameters()))
        newest = [record for record in watch.records if record.backward == 2]
        assert lines[3].split()[0] == max(newest, key=lambda r: r.zeros + r.subnormal).parameter
        assert watch._repr_html_().count("<tr>") == 1 + len(list(model.parameters()))


@pytest.mark.parametrize("level", LEVELS)
def test_of_several_backwards_each_record_is_of_the_sum_so_far(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, engine=engine)
        with GradientWatch(engine, every=1) as watch:
            for _ in range(3):
                backward(NORMED_MLP.loss(model, NORMED_MLP.batch(0)), optimizer, engine=engine)
        for name, _ in model.named_parameters():
            norms = [record.norm for record in watch.records if record.parameter == name]
            rounding = {"O3": 3e-3, "O5": 1e-2}.get(level, 1e-5)
            assert norms == pytest.approx([norms[0], 2 * norms[0], 3 * norms[0]], rel=rounding)


@pytest.mark.parametrize("level", LEVELS)
def test_a_rehearsal_is_not_watched(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, engine=engine)
        with GradientWatch(engine, every=1) as watch:
            train(NORMED_MLP, model, optimizer, "c", engine=engine)
            engine.find_overflow(lambda: NORMED_MLP.loss(model, NORMED_MLP.batch(0)))
            train(NORMED_MLP, model, optimizer, "c", engine=engine)
        assert sorted({record.backward for record in watch.records}) == [1, 2]


def test_refusals() -> None:
    with Engine() as engine:
        started("O2", engine=engine)
        with pytest.raises(AmpTypeError, match="every=100"):
            GradientWatch(engine, every=1.5)  # type: ignore[arg-type]
        with pytest.raises(AmpValueError, match="every=0"):
            GradientWatch(engine, every=0)
        with pytest.raises(AmpTypeError, match=r"torch\.int32"):
            GradientWatch(engine, dtype=torch.int32)
        with GradientWatch(engine), pytest.raises(AmpStateError, match="watching already"), GradientWatch(engine):
            pass
