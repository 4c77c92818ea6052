"""Loss scales with a rule of one's own, the one that follows gradients, and what becomes of steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from amp_engine import AmpStateError, AmpTypeError, AmpValueError, DynamicLossScale, Engine
from amp_engine.levels.policy import parse_loss_scale
from amp_engine.scaling.auto import FIRST_SCALE, LARGEST
from amp_engine.scaling.scaler import LossScaler
from tests.models import NORMED_MLP
from tests.ranks import on_ranks
from tests.support import DYNAMIC_LEVELS, assert_bitwise, backward, started, train


def moves(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each backward, `o` with an overflow and `c` without."""
    scales = []
    for outcome in overflows:
        scaler.record_(torch.tensor(outcome == "o"))
        scaler.update_()
        scales.append(scaler.loss_scale())
    return scales


def test_the_numbers_of_a_rule_are_those_of_the_scaler() -> None:
    rule = DynamicLossScale(init_scale=64.0, growth_factor=4.0, backoff_factor=0.125, growth_interval=2)
    assert moves(LossScaler(rule), "ccoocc") == [64.0, 256.0, 32.0, 4.0, 4.0, 16.0]


@pytest.mark.parametrize(("hysteresis", "expected"), [(1, [8, 4, 2]), (2, [16, 8, 4]), (3, [16, 16, 8])])
def test_hysteresis_forgives_as_megatron_does(hysteresis: int, expected: list[float]) -> None:
    # Until a clean backward the count stays used up, so that each further overflow lowers the scale.
    rule = DynamicLossScale(init_scale=16.0, hysteresis=hysteresis)
    assert moves(LossScaler(rule), "ooo") == expected
    assert moves(LossScaler(rule), "oocoo"[: 2 * hysteresis - 1])[-1] >= 16.0 / 2**3


def test_a_rule_has_bounds_of_its_own() -> None:
    rule = DynamicLossScale(init_scale=2.0**10, min_loss_scale=2.0**8, max_loss_scale=2.0**11, growth_interval=1)
    assert moves(LossScaler(rule), "ccooooo") == [2.0**11, 2.0**11, 2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**8]


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"init_scale": 0.0}, r"init_scale=0.0\): init_scale is a positive finite number"),
        ({"growth_factor": 1.0}, "growth_factor is a finite number above 1"),
        ({"backoff_factor": 1.5}, "backoff_factor is a number between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval is a whole number from 1 on"),
        ({"hysteresis": 1.5}, "hysteresis is a whole number from 1 on"),
        ({"min_loss_scale": 4.0, "max_loss_scale": 2.0}, "max_loss_scale is at least min_loss_scale"),
        ({"min_loss_scale": "a"}, "min_loss_scale is None or a finite number"),
        ({"max_loss_scale": float("inf")}, "max_loss_scale is None or a positive finite number"),
        ({"init_scale": "x"}, "init_scale is a positive finite number"),
        ({"backoff_factor": None}, "backoff_factor is a number between 0 and 1"),
    ],
)
def test_a_wrong_number_says_what_is_allowed(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(AmpValueError, match=said):
        DynamicLossScale(**keywords)


@pytest.mark.parametrize("bad", ["automatic", "dynamic(growth=3)", "dynamic(growth_interval=x)", None.__class__])
def test_another_loss_scale_is_refused(bad: Any) -> None:
    with Engine() as engine, pytest.raises(AmpValueError, match=r'neither "dynamic", "auto", a DynamicLossScale'):
        engine.initialize(nn.Linear(2, 2), opt_level="O2", loss_scale=bad, verbosity=0)


@pytest.mark.parametrize(
    "loss_scale", ["auto", "dynamic", DynamicLossScale(), DynamicLossScale(growth_interval=7, min_loss_scale=0.5)]
)
def test_its_text_reads_back(loss_scale: Any) -> None:
    assert parse_loss_scale(str(loss_scale)) == loss_scale


def test_a_bound_may_be_written_as_none() -> None:
    assert DynamicLossScale.parse("dynamic(hysteresis=2 max_loss_scale=None)") == DynamicLossScale(hysteresis=2)


def gradient(scaler: LossScaler, magnitude: float) -> bool:
    """Run one backward whose largest unscaled gradient is this; return whether it overflows, as float16 does."""
    snapshot = scaler.snapshot()
    largest = torch.tensor(magnitude * scaler.loss_scale()).half().float()
    scaler.record_(~largest.isfinite())
    return bool(scaler.update_(snapshot, largest)[0] != 0)


def test_auto_takes_the_largest_power_of_two_that_leaves_headroom() -> None:
    scaler = LossScaler("auto")
    assert scaler.loss_scale() == FIRST_SCALE
    for magnitude, expected in ((1.5, 4096.0), (1.5, 4096.0), (0.75, 4096.0), (3.0, 2048.0)):
        assert not gradient(scaler, magnitude)
        # 65504 / (2**3 * magnitude), rounded down to a power of two; smaller gradients are forgotten slowly.
        assert scaler.loss_scale() == expected
        assert 8 * magnitude * scaler.loss_scale() <= LARGEST


def after_burst(bad: float, script: str) -> dict[str, Any]:
    """Train with a bad batch for each `x` of `script`, and count taken steps whose gradients were all 0."""
    with Engine() as engine:
        model, optimizer = started("O2", engine=engine, loss_scale="auto")
        scales, flushed = [], 0
        for index, outcome in enumerate(script):
            optimizer.zero_grad()
            loss = NORMED_MLP.loss(model, NORMED_MLP.batch(index))
            backward(loss * bad if outcome == "x" else loss, optimizer, engine=engine)
            grads = [weight.grad for weight in engine.master_params(optimizer) if weight.grad is not None]
            zero = not any(bool(grad.any()) for grad in grads)
            optimizer.step()
            flushed += zero and not engine.last_step().skipped
            scales.append(engine.scalers[0].loss_scale())
        assert len(engine.overflow_report()) == script.count("x")
        return {"scales": scales, "flushed": flushed}


BURSTS = ["ccccx", "cccc" + 6 * "x", "cccc" + 20 * "x", "cccc" + 10 * "xc", 6 * "x"]


@pytest.mark.parametrize("burst", BURSTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_says_nothing_of_an_auto_scale(bad: float, burst: str) -> None:
    found = after_burst(bad, burst + "cc")
    clean = after_burst(bad, "cccccc")
    assert found["flushed"] == 0
    assert found["scales"][burst.index("x")] == ([FIRST_SCALE, *clean["scales"]])[burst.index("x")]
    assert found["scales"][-1] >= clean["scales"][-1] / 2


def test_of_delayed_backwards_any_bad_loss_spares_the_auto_scale() -> None:
    for bad in range(3):
        with Engine() as engine:
            model, optimizer = started("O2", engine=engine, loss_scale="auto")
            train(NORMED_MLP, model, optimizer, "cccc", engine=engine)
            before = engine.scalers[0].loss_scale()
            optimizer.zero_grad()
            for index in range(3):
                loss = NORMED_MLP.loss(model, NORMED_MLP.batch(index)) * (float("nan") if index == bad else 1.0)
                backward(loss, optimizer, engine=engine, delay_unscale=index < 2)
            optimizer.step()
            assert engine.last_step().skipped
            assert engine.scalers[0].loss_scale() == before
            train(NORMED_MLP, model, optimizer, "o", engine=engine)  # is not spared by a loss of before
            assert engine.scalers[0].loss_scale() < before


@pytest.mark.parametrize("burst", [1, 2, 17, 40])
def test_an_auto_scale_is_never_lower_than_two_steep_overflows_or_a_dynamic_scale(burst: int) -> None:
    scaler = LossScaler("auto")
    gradient(scaler, 1.0)
    before = scaler.loss_scale()
    for _ in range(burst):
        snapshot = scaler.snapshot()
        scaler.record_(torch.tensor(True))
        scaler.update_(snapshot, torch.tensor(float("nan")))
    assert scaler.loss_scale() == max(2.0**-24, before * min(2.0 ** (-8 * min(burst, 2)), 2.0**-burst))
    gradient(scaler, 1.0)
    gradient(scaler, 1.0)
    assert scaler.loss_scale() >= before * 2.0**-10  # at once


def test_a_step_on_gradients_that_are_all_zero_after_overflows_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with Engine() as engine:
        torch.manual_seed(0)
        model = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level="O2", loss_scale="auto")
        caplog.clear()
        scales = []
        for index in range(60):
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 4)).float() * 1e-3).sum()
            backward(loss, optimizer, overflow=4 <= index < 50, engine=engine)
            optimizer.step()
            scales.append(engine.scalers[0].loss_scale())
        said = [record for record in caplog.records if "all gradients were 0" in record.getMessage()]
        assert len(said) == 1
        assert said[0].levelname == "WARNING"
        assert f"at the loss scale {scales[49]} of loss scaler 0" in said[0].getMessage()
        assert f"the scale is {scales[50]} from now on" in said[0].getMessage()
        assert scales[50] >= 2.0**10 * scales[49]


def test_a_first_burst_of_all_does_not_leave_an_auto_scale_where_every_gradient_is_zero() -> None:
    scaler = LossScaler("auto")
    for _ in range(60):
        scaler.record_(torch.tensor(True))
        scaler.update_(scaler.snapshot(), torch.tensor(float("nan")))
    assert scaler.loss_scale() == 2.0**-24
    gradient(scaler, 2.0**-10)
    assert scaler.loss_scale() == FIRST_SCALE / 2
    assert not gradient(scaler, 2.0**-10)


def test_what_an_earlier_version_saved_of_an_auto_scale_is_loaded() -> None:
    with Engine() as engine:
        started("O2", engine=engine, loss_scale="auto")
        state = engine.state_dict()
        del state["loss_scaler0"]["overflows_in_a_row"]
        state["loss_scaler0"].update(loss_scale=2.0**-30, seen=1.0, limit=2.0**40, reach=2.0**-30)
        engine.load_state_dict(state)
        scaler = engine.scalers[0]
        gradient(scaler, 1.0)
        assert scaler.loss_scale() >= 4.0


def test_auto_stays_where_all_gradients_are_zero() -> None:
    scaler = LossScaler("auto")
    gradient(scaler, 0.0)
    assert scaler.loss_scale() == FIRST_SCALE


# The second script is cut where more overflows came in a row than are forgiven.
@pytest.mark.parametrize("script", ["ccoccooocccoc", "ccooooooccocc", "cccoooo" + 16 * "o" + "ccc"])
@pytest.mark.parametrize("loss_scale", ["auto", DynamicLossScale(hysteresis=3, growth_interval=2)])
def test_a_resume_is_bitwise(loss_scale: Any, script: str) -> None:
    with Engine() as engine:
        model, optimizer = started("O2", engine=engine, loss_scale=loss_scale)
        train(NORMED_MLP, model, optimizer, script[:7], engine=engine)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), engine.state_dict()))
        train(NORMED_MLP, model, optimizer, script[7:], first=7, engine=engine)
        uncut = copy.deepcopy((model.state_dict(), engine.state_dict()))
    with Engine() as engine:
        model, optimizer = started("O2", engine=engine, loss_scale=loss_scale, seed=1)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        engine.load_state_dict(saved[2])
        train(NORMED_MLP, model, optimizer, script[7:], first=7, engine=engine)
        assert_bitwise(dict(model.state_dict()), dict(uncut[0]))
        assert engine.state_dict() == uncut[1]
        assert "seen" in uncut[1]["loss_scaler0"] or "overflows_left" in uncut[1]["loss_scaler0"]


@pytest.mark.parametrize("bad", [{"seen": "much"}, {"limit": float("nan")}, {"overflows_left": -1}])
def test_a_damaged_memory_is_refused_before_anything_is_loaded(bad: dict[str, Any]) -> None:
    with Engine() as engine:
        started("O2", engine=engine, loss_scale="auto")
        state = engine.state_dict()
        state["loss_scaler0"].update(bad, loss_scale=4.0)
        with pytest.raises(AmpValueError, match="loss scaler"):
            engine.load_state_dict(state)
        assert engine.scalers[0].loss_scale() == FIRST_SCALE


def scale_after_a_burst_on(rank: int, reduces_itself: bool) -> list[float]:
    """The scale after each batch; the loss of one rank is not finite in some, and the gradients of both are then."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    group = None if reduces_itself else torch.distributed.group.WORLD
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level="O2", loss_scale="auto", verbosity=0, process_group=group)
        scales = []
        for index in range(10):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).sum() * (float("nan") if rank == 1 and 3 <= index < 7 else 1.0)
            with engine.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
                if reduces_itself:
                    torch.distributed.all_reduce(model.weight.grad)
            optimizer.step()
            scales.append(engine.scalers[0].loss_scale())
        return scales


def on_rank(rank: int) -> dict[Any, Any]:
    return {
        **{reduces: scale_after_a_burst_on(rank, reduces) for reduces in (False, True)},
        "without a gradient": scale_of_ranks_without_gradients(rank),
        "unlike gradients": scale_on(rank),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return on_ranks(on_rank, 2)


@pytest.mark.parametrize("reduces_itself", [False, True])
def test_ranks_have_one_auto_scale_where_the_loss_of_one_is_not_finite(
    ranks: list[dict[Any, Any]], reduces_itself: bool
) -> None:
    ours, theirs = (rank[reduces_itself] for rank in ranks)
    assert ours == theirs
    assert (min(ours[3:7]) == ours[2]) == (not reduces_itself)
    assert ours[-1] >= 2.0**-12 * ours[2]


def scale_of_ranks_without_gradients(rank: int) -> float:
    model = nn.Linear(4, 4)
    unused = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([unused] if rank == 1 else model.parameters(), lr=1e-6)
    with Engine() as engine:
        world = torch.distributed.group.WORLD
        engine.initialize(model, optimizer, opt_level="O2", loss_scale="auto", verbosity=0, process_group=world)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model(torch.ones(2, 4)).sum(), optimizer, engine=engine)
            optimizer.step()
        return engine.scalers[0].loss_scale()


def test_a_rank_without_a_gradient_agrees_on_an_auto_scale_too(ranks: list[dict[Any, Any]]) -> None:
    ours, theirs = (rank["without a gradient"] for rank in ranks)
    assert ours == theirs != FIRST_SCALE


def scale_on(rank: int) -> float:
    """The scale of ranks whose gradients are of other sizes, and are not reduced."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with Engine() as engine:
        engine.initialize(
            model,
            optimizer,
            opt_level="O2",
            loss_scale="auto",
            verbosity=0,
            process_group=torch.distributed.group.WORLD,
        )
        for _ in range(3):
            optimizer.zero_grad()
            with engine.scale_loss(model(torch.ones(2, 4)).sum() * 10.0**rank, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        return engine.scalers[0].loss_scale()


def test_ranks_that_agree_on_overflows_agree_on_an_auto_scale(ranks: list[dict[Any, Any]]) -> None:
    ours, theirs = (rank["unlike gradients"] for rank in ranks)
    assert ours == theirs
    assert 8 * 20.0 * ours <= LARGEST < 16 * 20.0 * ours  # the larger gradient: 2 * 10


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_last_step_tells_what_became_of_it(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, engine=engine)
        assert not engine.last_step().skipped
        train(NORMED_MLP, model, optimizer, "c", engine=engine)
        clean = engine.last_step(optimizer)
        assert clean.is_known
        assert not clean.skipped
        assert not bool(clean.flag)
        if level in ("O1", "O2", "O4", "O5"):
            optimizer.zero_grad()
            loss = NORMED_MLP.loss(model, NORMED_MLP.batch(1))
            with engine.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            norm = torch.stack([p.grad.float().norm() for p in engine.master_params(optimizer)]).norm()
            optimizer.step()
            assert engine.last_step().norm == pytest.approx(norm.item(), rel=1e-5)
            assert engine.last_step().loss == pytest.approx(loss.item())
        else:
            assert (clean.norm, clean.loss_scale) == (None, 1.0)
        if level in ("O1", "O2"):
            scale = engine.scalers[0].loss_scale()
            train(NORMED_MLP, model, optimizer, "o", first=2, engine=engine)
            last = engine.last_step()
            assert last.skipped
            assert bool(last.flag)
            assert last.loss_scale == scale
            assert "skipped" in repr(last)
            assert not clean.skipped  # what was asked before stays


@pytest.mark.parametrize("closed_by", ["exit", "step"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_of_backwards_that_were_delayed_the_last_loss_is_told(level: str, closed_by: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, engine=engine)
        losses = []
        for index in range(2):
            loss = NORMED_MLP.loss(model, NORMED_MLP.batch(index))
            losses.append(loss.item())
            delays = index == 0 or closed_by == "step"
            with engine.scale_loss(loss, optimizer, delay_unscale=delays) as scaled_loss:
                (scaled_loss * (1.0 if index == 0 else float("inf"))).backward()
        optimizer.step()
        assert losses[0] != losses[1]
        assert engine.last_step().loss == losses[1]
        (record,) = engine.overflow_report()
        assert (record.backward, record.loss) == (2, losses[1])


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_the_norm_is_that_of_the_gradients_which_were_stepped(level: str) -> None:
    models = [nn.Embedding(6, 4, sparse=level != "O3"), nn.Linear(4, 4)]
    with Engine() as engine:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        engine.initialize(models, optimizers, opt_level=level, loss_scale=2.0**4, verbosity=0)
        x = torch.tensor([0, 1, 1])
        for count in (1, 2):
            norms = []
            for _ in range(count):
                loss = models[1](models[0](x)).float().square().mean()
                with engine.scale_loss(loss, optimizers) as scaled_loss:
                    scaled_loss.backward()
            for optimizer in optimizers:
                grads = [
                    p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in engine.master_params(optimizer)
                ]
                norms.append(sum(float(g.double().square().sum()) for g in grads) ** 0.5)
            for optimizer, norm in zip(optimizers, norms, strict=True):
                optimizer.step()
                expected = pytest.approx(norm, rel=2e-3) if count == 1 else None
                assert engine.last_step(optimizer).norm == expected
                optimizer.zero_grad()


@pytest.mark.parametrize("level", DYNAMIC_LEVELS)
def test_auto_sees_sparse_gradients(level: str) -> None:
    scales = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(6, 4, sparse=sparse)
        with Engine() as engine:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            engine.initialize(model, optimizer, opt_level=level, loss_scale="auto", verbosity=0)
            for _ in range(4):
                with engine.scale_loss(model(torch.tensor([0, 1, 1])).square().sum(), optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            scales.append(engine.scalers[0].loss_scale())
    assert scales[0] == scales[1] != FIRST_SCALE


def test_bounds_that_contradict_those_of_initialize_change_nothing() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Engine() as engine:
        rule = DynamicLossScale(min_loss_scale=2.0**10)
        with pytest.raises(AmpValueError, match="0 <= min_loss_scale <= max_loss_scale"):
            engine.initialize(model, optimizer, opt_level="O2", loss_scale=rule, max_loss_scale=2.0, verbosity=0)
        assert model.weight.dtype is torch.float32
        assert engine.policy is None
        engine.initialize(model, optimizer, opt_level="O2", loss_scale=rule, verbosity=0)


def test_of_several_optimizers_one_is_to_be_named() -> None:
    with Engine() as engine:
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        engine.initialize(models, optimizers, opt_level="O2", verbosity=0)
        with pytest.raises(AmpStateError, match=r"2 are initialized.*last_step\(optimizer\)"):
            engine.last_step()
        assert not engine.last_step(optimizers[1]).skipped


@pytest.mark.parametrize("level", ["O0", "O2", "O4"])
def test_a_scheduler_follows_the_steps_that_were_taken(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, engine=engine)
        scheduler = LambdaLR(optimizer, lambda count: 1.0 / (1 + count))
        script = "ccooc" if level == "O2" else "ccc"
        stepped = []
        for index, outcome in enumerate(script):
            train(NORMED_MLP, model, optimizer, outcome, first=index, engine=engine)
            stepped.append(engine.step_scheduler(scheduler))
        assert stepped == [int(outcome == "c") for outcome in script]
        assert scheduler.last_epoch == script.count("c")
        later = StepLR(optimizer, 1)  # one that is made in the middle of a run begins there
        train(NORMED_MLP, model, optimizer, "c", first=9, engine=engine)
        assert engine.step_scheduler(later) == 1


def test_what_is_no_scheduler_is_refused() -> None:
    with Engine() as engine:
        _, optimizer = started("O2", engine=engine)
        with pytest.raises(AmpTypeError, match="not a float"):
            engine.step_scheduler(0.1)  # type: ignore[arg-type]
        del optimizer
