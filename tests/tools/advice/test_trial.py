"""The engine of a trial, in this process: another level, what it sees, when it ends the script."""

from __future__ import annotations

import gc
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_engine import amp
from amp_engine.errors import AmpStateError
from amp_engine.ground.dtypes import cpu_lacks
from amp_engine.optimizers import LARC
from amp_engine.tools.advice import trial as trials
from amp_engine.tools.advice.records import Task, Trial
from amp_engine.tools.telemetry import step_times
from amp_engine.tools.telemetry.receipt import memory
from tests.support import HALF, LEVELS


class Clock:
    """Tells the time that a test sets."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def between(self, start: float, end: float) -> tuple[float, float | None]:
        return end - start, None


class Bench:
    """A trial in this process, and what it wrote."""

    def __init__(self, path: str, clock: Clock, exits: list[int], level: str = "O0", steps: int = 4, **changed: Any):
        self.path, self.clock, self.exits = path, clock, exits
        self.engine = trials.TrialEngine(Task(level, steps, **({"deadline": math.inf, "path": path} | changed)))

    @property
    def is_written(self) -> bool:
        return os.path.exists(self.path)

    @property
    def trial(self) -> Trial:
        with open(self.path, "rb") as file:
            trial = pickle.load(file)
        assert isinstance(trial, Trial)
        return trial


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []
    clock = Clock()
    exits: list[int] = []
    monkeypatch.setattr(step_times, "now", clock.now)
    monkeypatch.setattr(step_times, "seconds_between", clock.between)
    monkeypatch.setattr(os, "_exit", exits.append)

    def make(*args: Any, **keywords: Any) -> Bench:
        made.append(Bench(str(tmp_path / f"trial_{len(made)}"), clock, exits, *args, **keywords))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def parts() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(engine: Any, model: nn.Module, optimizer: Optimizer, steps: int = 9) -> None:
    for _ in range(steps):
        with engine.scale_loss(model(torch.ones(3, 4)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def script(bench: Bench, steps: int = 100, backwards: int = 1, **options: Any) -> tuple[nn.Module, Optimizer]:
    """Run as a training script would. Each step takes ten seconds of the clock."""
    engine = bench.engine
    model, optimizer = engine.initialize(*parts(), **options)
    x, y = torch.randn(16, 4), torch.randn(16, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(backwards):
            loss = nn.functional.mse_loss(model(x).float(), y)
            with engine.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        bench.clock.time += 10.0
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
def test_a_script_runs_at_the_level_of_the_trial_and_ends_after_its_steps(level, bench):
    one = bench(level)
    with pytest.raises(SystemExit) as end:
        script(one, opt_level="O1", verbosity=0)
    trial = one.trial
    assert end.value.code == 0
    assert (trial.level, trial.asked, trial.steps) == (level, "O1", 4)
    assert trial.dtype == (str(HALF[level]).removeprefix("torch.") if level in HALF else None)
    assert trial.seconds == (10.0, 10.0, 10.0)
    assert trial.losses[-1][0] < trial.losses[0][0]
    assert trial.dynamic == (level in ("O1", "O2"))
    assert trial.loss_scales == ((65536.0,) if trial.dynamic else (1.0,))
    assert {m.kind for m in trial.memory} >= {"parameters", "optimizer state", "gradients"}
    assert ("FP32 masters" in {m.kind for m in trial.memory}) == (level in ("O2", "O5"))
    assert (trial.dropped, trial.error, trial.out_of_time, trial.skips) == ((), None, False, 0)
    assert "thread" in trial.machine
    assert trial.lacks == (cpu_lacks(HALF[level]) if level in HALF else None)


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_a_trial_has_the_inputs_whose_cast_lost_what_they_say(level, bench):
    one = bench(level)
    model, optimizer = one.engine.initialize(*parts(), opt_level="O1", verbosity=0)

    def script() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(9):
                with one.engine.scale_loss(model(torch.full((3, 4), 1001.0)).sum(), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()

    with pytest.raises(SystemExit):
        script()
    said = "the cast of the argument 'input' of Sequential to bfloat16 changed whole numbers: bfloat16 holds them up to"
    assert one.trial.inputs == ((f"{said} 256",) if level == "O5" else ())


def test_the_first_losses_of_all_levels_are_nearly_those_of_o0(bench):
    first = []
    for level in LEVELS:
        one = bench(level)
        with pytest.raises(SystemExit):
            script(one, verbosity=0)
        one.engine.close()
        first.append(one.trial.losses[0][0])
    assert first == pytest.approx([first[0]] * len(LEVELS), rel=1e-2)


def test_a_script_that_ends_early_is_written_by_whoever_asks(bench):
    one = bench(steps=10)
    script(one, steps=3)
    assert not one.is_written
    one.engine.write()
    trial = one.trial
    assert (trial.steps, trial.out_of_time) == (3, False)
    assert trial.memory  # looked at in the second step already
    os.remove(one.path)
    one.engine.write()
    assert not one.is_written


def test_what_was_never_initialized_is_written_too(bench):
    one = bench()
    one.engine.write()
    assert one.trial == Trial("O0")


def test_a_script_that_catches_system_exit_is_ended_for_good(bench):
    one = bench(steps=2)
    model, optimizer = one.engine.initialize(*parts())
    caught, exits = [], []
    for _ in range(3):
        with one.engine.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled:
            scaled.backward()
        try:
            optimizer.step()
        except SystemExit:
            caught.append(one.is_written)
        exits.append(len(one.exits))
    assert caught[0]
    assert exits[:2] == [0, 0]
    assert exits[2] > 0
    assert one.trial.steps == 2


@pytest.mark.parametrize("again", ["initialize", "scale_loss", "step"])
def test_whatever_it_goes_on_with_ends_it(again, bench):
    one = bench(steps=2)
    model, optimizer = one.engine.initialize(*parts())
    with pytest.raises(SystemExit):
        train(one.engine, model, optimizer)
    assert one.exits == []
    if again == "initialize":
        one.engine.initialize(*parts())
    elif again == "scale_loss":
        one.engine.scale_loss(model(torch.ones(1, 4)).sum(), optimizer)
    else:
        with pytest.raises(SystemExit):
            optimizer.step()
    assert one.exits == [0]


def test_a_second_training_is_counted_on(bench):
    one = bench(steps=5)
    script(one, steps=2)
    gc.collect()
    with pytest.raises(SystemExit):
        script(one, steps=9)
    assert one.trial.steps == 5


def test_a_child_that_was_forked_from_it_writes_and_ends_nothing(bench, monkeypatch):
    one = bench(steps=2)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    script(one, steps=3)
    one.engine.write()
    assert (one.is_written, one.exits) == (False, [])


def test_the_first_step_after_the_deadline_is_the_last(bench, monkeypatch):
    one = bench(steps=50, deadline=100.0)
    monkeypatch.setattr(trials, "monotonic", lambda: now)
    now = 0.0

    def pass_time(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal now
        now += 40.0

    handle = register_optimizer_step_pre_hook(pass_time)
    try:
        with pytest.raises(SystemExit):
            script(one)
    finally:
        handle.remove()
    assert (one.trial.steps, one.trial.out_of_time) == (3, True)


def test_what_the_trial_does_itself_is_in_no_time(bench, monkeypatch):
    one = bench(steps=6, perturb=True)
    looked = []

    def slow(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            one.clock.time += 1000.0
            looked.append(name)
            return function(*args, **keywords)

        return timed

    monkeypatch.setattr(memory, "described", slow("memory", memory.described))
    monkeypatch.setattr(trials, "perturb", slow("perturb", trials.perturb))
    monkeypatch.setattr(trials.MagnitudeCounter, "add", slow("gradients", trials.MagnitudeCounter.add))
    with pytest.raises(SystemExit):
        script(one)
    assert one.trial.seconds == (10.0,) * 5
    each = ["gradients"] * 4  # parameters
    assert looked == ["perturb", "memory", *each, *each, "memory", *each]


def test_a_perturbation_moves_weights_by_rounding_and_the_same_each_time(bench):
    runs = {}
    for name, perturb in (("plain", False), ("first", True), ("second", True)):
        one = bench(steps=6, perturb=perturb)
        with pytest.raises(SystemExit):
            script(one)
        runs[name] = one.trial.losses
    assert runs["first"] == runs["second"]
    assert runs["first"][:1] == runs["plain"][:1], "the first step is not perturbed, checkpoints are loaded before it"
    assert runs["first"][1:] != runs["plain"][1:]
    assert runs["first"][5][0] == pytest.approx(runs["plain"][5][0], rel=1e-2)


def test_perturbing_leaves_random_numbers_alone_and_stays_below_half_a_unit_of_float16():
    model = nn.Linear(50, 50)
    before = model.weight.detach().clone()
    state = torch.get_rng_state()
    trials.perturb([model, model], seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    moved = ((model.weight.detach() - before) / before).abs()
    assert 2.0**-12 < moved.max() < 2.0**-11 * 1.001


def test_gradients_of_the_last_three_steps_are_counted_where_it_perturbs(bench):
    one, other = bench(steps=5, perturb=True), bench(steps=5)
    for each in (one, other):
        with pytest.raises(SystemExit):
            script(each)
    assert one.trial.gradients is not None
    assert one.trial.gradients.total == 3 * (4 * 8 + 8 + 8 * 2 + 2)
    assert other.trial.gradients is None


def test_each_loss_of_a_step_is_kept(bench):
    one = bench("O2", steps=3)
    with pytest.raises(SystemExit):
        script(one, backwards=2, verbosity=0)
    assert [len(losses) for losses in one.trial.losses] == [2, 2, 2]


def test_steps_are_those_of_the_first_optimizer_also_inside_of_larc(bench):
    one = bench("O1", steps=2)
    first, second = parts(), parts()
    models, optimizers = one.engine.initialize(
        [first[0], second[0]], [LARC(first[1]), second[1]], num_losses=2, verbosity=0
    )
    second_steps = 0

    def run() -> None:
        nonlocal second_steps
        while True:
            for loss_id, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                with one.engine.scale_loss(model(torch.ones(3, 4)).sum(), optimizer, loss_id) as scaled:
                    scaled.backward()
            for _ in range(3):
                optimizers[1].step()
                second_steps += 1
            optimizers[0].step()

    with pytest.raises(SystemExit):
        run()
    assert second_steps == 6
    assert [len(losses) for losses in one.trial.losses] == [2, 2]
    assert len(one.trial.loss_scales) == 2


def test_skipped_steps_are_counted_and_the_scale_is_that_of_the_end(bench):
    one = bench("O2", steps=4)
    with pytest.raises(SystemExit):
        script(one, verbosity=0, opt_level="O2", loss_scale=amp.DynamicLossScale(init_scale=2.0**24))
    assert one.trial.skips > 0
    assert one.trial.loss_scales == (2.0**24 / 2**one.trial.skips,)


def test_what_close_takes_along_is_kept(bench):
    one = bench("O2", steps=99)
    kept = script(one, steps=3, verbosity=0, loss_scale=amp.DynamicLossScale(init_scale=2.0**24))
    skips = one.engine.records.all[0].pending.skips
    one.engine.close()
    kept[1].step()  # does not count any more
    assert not kept[1]._optimizer_step_post_hooks
    script(one, steps=2, verbosity=0)
    one.engine.write()
    assert skips > 0
    assert (one.trial.steps, one.trial.skips) == (5, skips)


def test_skips_are_counted_once_in_a_script_that_initializes_twice(bench):
    one = bench("O2", steps=99)
    kept = script(one, steps=3, verbosity=0, loss_scale=amp.DynamicLossScale(init_scale=2.0**24))
    skips = one.engine.records.all[0].pending.skips
    one.engine.initialize(*parts(), verbosity=0)
    train(one.engine, *kept, steps=2)
    one.engine.write()
    assert skips > 0
    assert (one.trial.steps, one.trial.skips) == (5, one.engine.records.all[0].pending.skips)


def test_what_the_script_has_dropped_is_kept(bench):
    """At the end of a script its models and optimizers are gone, before the trial is written."""
    one = bench("O2", steps=99)
    for _ in range(2):
        script(one, steps=1, verbosity=0, loss_scale=amp.DynamicLossScale(init_scale=2.0**24))
        gc.collect()
    one.engine.write()
    assert (one.trial.steps, one.trial.skips, one.trial.dynamic) == (2, 2, True)
    assert "thread" in one.trial.machine


def test_a_model_without_amp_is_tried_with_it(bench):
    one = bench("O2", steps=2)
    with pytest.raises(SystemExit):
        script(one, enabled=False, verbosity=0)
    assert [drop.argument for drop in one.trial.dropped] == ["enabled=False"]
    assert one.trial.dtype == "float16"


def test_a_script_with_a_policy_is_tried_at_each_level(bench, tmp_path):
    path = tmp_path / "policy.json"
    amp.RunPolicy("O2", ("2",), loss_scale=128.0).save(path)
    for level in LEVELS:
        one = bench(level, steps=2)
        with pytest.raises(SystemExit):
            script(one, policy=str(path), verbosity=0)
        policy = one.engine.policy
        assert policy is not None
        assert (one.trial.level, one.trial.asked, policy.opt_level) == (level, "O2", level)
        assert one.trial.loss_scales == ((128.0,) if level in ("O1", "O2") else (1.0,))
        one.engine.close()


@pytest.mark.parametrize("level", LEVELS)
def test_the_modules_of_a_policy_stay_in_fp32_at_each_level(level, bench):
    one = bench(level, steps=2)
    model, _ = one.engine.initialize(*parts(), policy=amp.RunPolicy("O2", ("2",)), verbosity=0)
    cast = HALF[level] if level in ("O2", "O3", "O5") else torch.float32
    assert [model[0].weight.dtype, model[2].weight.dtype] == [cast, torch.float32]


def test_an_argument_that_no_level_takes_stays_an_error_of_the_script(bench):
    one = bench("O5", steps=2)
    with pytest.raises(AssertionError, match="keep_batchnorm_fp32"):
        script(one, opt_level="O2", keep_batchnorm_fp32="maybe")
    with pytest.raises(AmpStateError, match="before|initialize"):
        one.engine.scale_loss(torch.ones(()), [])
