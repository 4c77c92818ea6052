"""A batch that is run once more leaves no trace, and none is run that would lose gradients."""

from __future__ import annotations

import copy
import queue
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_engine import AmpStateError, Engine
from amp_engine.saving.averages import AveragedModel
from amp_engine.tools.telemetry.compare_levels import compare_levels
from amp_engine.tools.telemetry.gradient_histogram import gradient_histogram
from amp_engine.tools.telemetry.step_times import StepTimes
from tests.models import NORMED_MLP
from tests.ranks import on_ranks
from tests.support import LEVELS, assert_bitwise, backward, frozen, started


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_gradients_that_wait_for_a_step_without_a_verdict_are_not_thrown_away(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, engine=engine, loss_scale=2.0**8)
        loss = NORMED_MLP.loss(model, NORMED_MLP.batch(0))
        backward(loss, optimizer, engine=engine, delay_overflow_check=True)
        before = [weight.detach().clone() for weight in engine.master_params(optimizer)]
        for call in (engine.find_overflow, lambda f: gradient_histogram(engine, f)):
            with pytest.raises(AmpStateError, match=r"wait for SGD\.step"):
                call(lambda: NORMED_MLP.loss(model, NORMED_MLP.batch(0)))
        optimizer.step()
        assert all(not torch.equal(a, b) for a, b in zip(before, engine.master_params(optimizer), strict=True))


class Averaging(nn.Module):
    """Puts another tensor in the place of a buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("newest", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        self.newest = x.detach()
        return x


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_buffers_that_a_forward_replaces_are_put_back(level: str) -> None:
    model = Averaging()
    with Engine() as engine:
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
        mean = model.mean
        before = mean.clone()
        engine.find_overflow(lambda: model(torch.randn(2, 4)).float().square().mean())
        assert model.mean is mean
        assert torch.equal(mean, before)
        assert model.newest is None
        assert set(dict(model.named_buffers())) == {"mean"}


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_gradients_that_are_views_of_buckets_keep_their_values(level: str) -> None:
    with Engine() as engine:
        model, optimizer = started(level, engine=engine)
        wrapped: Any = DistributedDataParallel(model, gradient_as_bucket_view=True)
        first, second = NORMED_MLP.batches(2)
        backward(NORMED_MLP.loss(wrapped, first), optimizer, engine=engine)
        optimizer.step()
        grads = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        engine.find_overflow(lambda: NORMED_MLP.loss(wrapped, second))
        for p, (grad, values) in zip(model.parameters(), grads, strict=True):
            assert p.grad is grad
            assert_bitwise(grad, values)


def test_a_clock_does_not_see_it() -> None:
    with Engine() as engine:
        model, optimizer = started("O2", engine=engine)

        def step() -> None:
            backward(NORMED_MLP.loss(model, NORMED_MLP.batch(0)), optimizer, engine=engine)
            optimizer.step()

        with StepTimes(engine) as times:
            step()
            engine.find_overflow(step)
        assert times.measured().steps == 1
        assert not engine.records.events.entering.observers


def history_of_a_rehearsed_rank(rank: int) -> dict[str, Any]:
    """Return the history of two steps and of a batch that is run once more, whose overflow other ranks agree on."""
    found = {}
    for level in ("O1", "O2"):
        with Engine() as engine:
            model, optimizer = started(level, engine=engine, process_group=torch.distributed.group.WORLD)

            def batch(model: nn.Module = model, optimizer: Any = optimizer, engine: Engine = engine) -> None:
                backward(NORMED_MLP.loss(model, NORMED_MLP.batch(rank)), optimizer, engine=engine)

            for _ in range(2):
                batch()
                optimizer.step()
                optimizer.zero_grad()
            engine.find_overflow(batch)
            track = engine._scaling.history.track(0)
            found[level] = track.backwards, [loss.number for loss in track.losses]
    return found


def test_a_batch_that_is_run_once_more_on_ranks_is_not_in_the_history() -> None:
    for found in on_ranks(history_of_a_rehearsed_rank, 2):
        assert found == {level: (2, [1, 2]) for level in ("O1", "O2")}


SEEDED = torch.Generator()


def drawn(generators: dict[str, Any]) -> list[float]:
    """A number of each generator."""
    return [
        random.random(),
        float(np.random.rand()),
        float(torch.rand(())),
        float(torch.rand((), generator=generators["torch"])),
        float(torch.rand((), generator=SEEDED)),
        generators["python"].random(),
        float(generators["numpy"].random()),
        float(generators["old"].rand()),
    ]


class FailingError(Exception):
    """The error that a step function raises."""


LOOKS: dict[str, Callable[[Engine, Callable[[], Any]], Any]] = {
    "find_overflow": lambda engine, step_fn: engine.find_overflow(step_fn),
    "gradient_histogram": gradient_histogram,
}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_random_numbers_go_on_as_if_nobody_had_looked(level: str, look: str, raises: bool) -> None:
    generators = {
        "torch": torch.Generator().manual_seed(3),
        "python": random.Random(3),
        "numpy": np.random.default_rng(3),
        "old": np.random.RandomState(3),
    }
    found = []
    for looks in (False, True):
        generators["torch"].manual_seed(3)
        SEEDED.manual_seed(3)
        generators.update(python=random.Random(3), numpy=np.random.default_rng(3), old=np.random.RandomState(3))
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        with Engine() as engine:
            model, _ = started(level, engine=engine)

            def step_fn(model: nn.Module = model) -> Tensor:
                loss = NORMED_MLP.loss(model, NORMED_MLP.batch(0)) * (1 + drawn(generators)[0])
                if raises:
                    raise FailingError
                return loss

            random.seed(3), np.random.seed(3), torch.manual_seed(3)
            if looks:
                with pytest.raises(FailingError) if raises else nullcontext():
                    LOOKS[look](engine, step_fn)
            found.append(drawn(generators))
    assert found[0] == found[1]


class Loop:
    """A training loop with all that moves in it."""

    def __init__(self, level: str, engine: Engine) -> None:
        self.engine = engine
        self.model, self.optimizer = started(level, engine=engine)
        self.average = AveragedModel(self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        self.own_average = torch.optim.swa_utils.AveragedModel(nn.Linear(3, 3))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.other_optimizer = torch.optim.Adam(self.other.parameters(), lr=0.1)
        self.shadow = {name: torch.zeros(2, 3) for name in ("replaced", "written", "by data")}
        self.bank, self.running = [torch.zeros(3, 2).t(), torch.zeros(2)], torch.zeros(())
        self.inputs = torch.ones(2, 4, requires_grad=True)

    def step(self) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        self.model.eval()
        backward(NORMED_MLP.loss(self.model, NORMED_MLP.batch(0)), self.optimizer, engine=self.engine)
        self.model.train()
        self.optimizer.step()
        self.engine.step_scheduler(self.scheduler)
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.own_average.update_parameters(nn.Linear(3, 3))
        self.other_optimizer.zero_grad()
        self.shadow["replaced"] = self.shadow["replaced"] * 0.5 + 1
        self.shadow["written"].mul_(0.5).add_(1)
        self.shadow["by data"].data = self.shadow["by data"] + 1
        self.bank[0][1] += 1
        self.bank[1] = torch.ones(2)
        self.running += 1
        with torch.enable_grad():
            self.other(self.inputs).float().square().sum().backward()
        self.other_optimizer.step()
        self.optimizer.param_groups[0]["momentum"] = 0.1
        if not torch.backends.flags_frozen():  # as torch's own tests leave them, whose operators others here run
            torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark

    def state(self) -> Any:
        """Return all that a step moves."""
        return frozen(
            [
                [dict(one.state_dict()) for one in (self.model, self.average, self.own_average, self.other)],
                [one.state_dict() for one in (self.optimizer, self.other_optimizer, self.scheduler)],
                [[p.grad for p in one.parameters()] for one in (self.model, self.other)],
                dict(self.engine.state_dict()),
                [self.shadow, self.bank, self.running, self.inputs.grad],
                [module.training for module in self.model.modules()],
                torch.backends.cudnn.benchmark,
            ]
        )


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_whole_iteration_that_is_looked_at_moves_nothing_of_the_run(level: str, look: str) -> None:
    with Engine() as engine:
        loop = Loop(level, engine)
        benchmark = torch.backends.cudnn.benchmark
        try:
            for steps in range(2):
                before = loop.state()
                LOOKS[look](engine, loop.step)
                assert_bitwise(loop.state(), before)
                loop.step()
                assert loop.scheduler.last_epoch == 2 * (steps + 1)
        finally:
            if not torch.backends.flags_frozen():
                torch.backends.cudnn.benchmark = benchmark


def test_a_teacher_that_is_only_run_keeps_its_memory() -> None:
    teacher = nn.Linear(4, 4).requires_grad_(False)
    with Engine() as engine:
        model = nn.Linear(4, 4)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
        address, version = teacher.weight.data_ptr(), teacher.weight._version
        engine.find_overflow(lambda: (model(torch.ones(2, 4)) - teacher(torch.ones(2, 4))).float().square().mean())
        assert (teacher.weight.data_ptr(), teacher.weight._version) == (address, version)


def test_tensors_that_no_batch_writes_keep_their_version_in_graphs_that_wait() -> None:
    inputs = torch.ones(4, 2).t()
    with Engine() as engine:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level="O0", verbosity=0)
        loss = (inputs * torch.ones(2, 4, requires_grad=True)).sum()
        engine.find_overflow(lambda: model(inputs).square().mean())
        loss.backward()


def test_each_level_is_compared_with_the_same_numbers_of_a_generator_of_the_users() -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    compared = compare_levels(
        nn.Linear(4, 4), lambda model: model(torch.rand(2, 4, generator=generator)).float().square().mean(), "O2"
    )
    assert compared.loss_error < 0.01
    assert torch.equal(generator.get_state(), before)


# --- what a batch writes that no step writes ----------------------------------------------------------


class Writing(nn.Module):
    """A forward that writes parameters of the model, as momentum teachers, codebooks and norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8, max_norm=0.5)
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.teacher = nn.Linear(8, 8).requires_grad_(False)
        self.codes = nn.Parameter(torch.randn(3, 8), requires_grad=False)
        self.calls = 0

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
                slow.lerp_(fast.to(slow.dtype), 0.25)
            self.codes[self.calls % 3] = x.float().mean(0).to(self.codes.dtype)
            self.layer.weight.div_(self.layer.weight.norm())
            self.head.weight.data = self.head.weight.data * 0.75
        self.calls += 1
        return self.head(torch.tanh(self.layer(x)) + self.teacher(x) + self.codes[0])


@pytest.mark.filterwarnings("ignore:Low-precision parameters of the model were written before")  # which is true
@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("keywords", [{}, {"master_weights": "split"}], ids=["", "split"])
@pytest.mark.parametrize("level", LEVELS)
def test_parameters_that_a_forward_writes_and_their_masters_are_put_back(
    level: str, keywords: dict[str, Any], look: str, ranks: bool, request: pytest.FixtureRequest
) -> None:
    if keywords and level != "O5":
        pytest.skip("O5 alone splits")
    if ranks:
        request.getfixturevalue("one_process_group")
    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        with Engine() as engine:
            model = Writing()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            engine.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)

            def step(model: nn.Module = model, optimizer: Any = optimizer, engine: Engine = engine) -> None:
                optimizer.zero_grad()
                backward(model(torch.arange(5)).float().square().mean(), optimizer, engine=engine)
                optimizer.step()

            for index in range(3):
                if looks and (index or not ranks):  # with ranks the first entry has masters take their parameters
                    before = frozen([dict(model.state_dict()), model.calls])
                    LOOKS[look](engine, step)
                    assert_bitwise(frozen([dict(model.state_dict()), model.calls]), before)
                step()
            found.append(frozen([dict(model.state_dict()), optimizer.state_dict()]))
    assert_bitwise(*found)


class Slotted:
    __slots__ = ("never", "value", "__hidden")

    def __init__(self) -> None:
        self.value, self.__hidden = 1, [1]

    def move(self) -> None:
        self.value += 1
        self.__hidden = [*self.__hidden, 2]
        self.never = 3

    def state(self) -> Any:
        return self.value, self.__hidden, hasattr(self, "never")


COUNTS = {"global": 0}
GLOBAL = 0


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("look", LOOKS)
def test_what_a_batch_leaves_in_objects_of_the_user_goes(look: str, raises: bool) -> None:
    held: Any = SimpleNamespace(
        losses=[1.0],
        window=deque([1, 2, 3], maxlen=3),
        byname={"a": [1], "b": 2},
        ordered=OrderedDict(a=1, b=2),
        grown=defaultdict(list, {"a": [1]}),
        counted=Counter("ab"),
        seen={1, 2},
        nested={"deep": [{"er": deque([1])}]},
        slotted=Slotted(),
        frozen=nn.Linear(2, 2),
        nothing=None,
    )
    append, local = held.losses.append, 0

    def state() -> Any:
        names = ("losses", "window", "byname", "ordered", "grown", "counted", "seen", "nested", "nothing")
        kept = [(type(getattr(held, name)), copy.deepcopy(getattr(held, name))) for name in names]
        flags = [p.requires_grad for p in held.frozen.parameters()]
        more = [list(held.ordered), list(held.byname), held.slotted.state(), flags, sorted(vars(held))]
        return kept, more, local, GLOBAL, dict(COUNTS)

    with Engine() as engine:
        model = nn.Linear(4, 4)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)

        def step() -> Tensor:
            nonlocal local
            global GLOBAL
            loss = model(torch.ones(2, 4)).float().square().mean()
            append(loss)
            held.losses.append(loss)
            held.window.append(loss)
            held.byname["a"].append(loss)
            held.byname["c"] = loss
            del held.byname["b"]
            held.ordered.move_to_end("a")
            held.grown["z"].append(loss)
            held.counted.update("abc")
            held.seen.add(3)
            held.nested["deep"][0]["er"].rotate(), held.nested["deep"][0]["er"].append(2)
            held.slotted.move()
            held.frozen.requires_grad_(False)
            held.nothing, held.new = loss, loss
            local += 1
            GLOBAL += 1
            COUNTS["global"] += 1
            if raises:
                raise FailingError
            return loss

        lists, before = (held.losses, held.window, held.byname["a"]), state()
        with pytest.raises(FailingError) if raises else nullcontext():
            LOOKS[look](engine, step)
        assert state() == before
        assert all(a is b for a, b in zip(lists, (held.losses, held.window, held.byname["a"]), strict=True))
        assert not model.weight.grad_fn
        with nullcontext() if not raises else pytest.raises(FailingError):
            step()
        assert len(held.losses) == 3


def test_a_thread_and_its_queue_are_left_alone() -> None:
    given: queue.Queue[int] = queue.Queue()
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.extend(iter(given.get, -1)))
    with Engine() as engine:
        model = nn.Linear(4, 4)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", verbosity=0)

        def step() -> Tensor:
            thread.start()
            given.put(1)
            given.put(-1)
            thread.join()
            return model(torch.ones(2, 4)).square().mean()

        engine.find_overflow(step)
        assert (thread.is_alive(), given.qsize(), given.unfinished_tasks) == (False, 0, 2)


class Buffers(nn.Module):
    """Has buffers that nothing can write."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kind = kind
        with torch.inference_mode(kind == "inference"):
            one = torch.full((1, 4), 2.0, device="meta" if kind == "meta" else "cpu")
        self.register_buffer("odd", one.expand(3, 4) if kind == "expanded" else one)

    def forward(self, x: Tensor) -> Tensor:
        factor = 2.0 if self.kind == "meta" else self.odd[0].clone()
        if self.kind == "expanded" and self.training:
            with torch.no_grad():
                self.odd[:1].add_(1.0)
        return self.layer(x) * factor


@pytest.mark.parametrize("kind", ["expanded", "inference", "meta"])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_buffers_that_nothing_can_write_are_no_obstacle(level: str, look: str, kind: str) -> None:
    with Engine() as engine:
        model = Buffers(kind)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
        odd = model.odd
        found = LOOKS[look](engine, lambda: model(torch.ones(2, 4)).float().square().mean())
        assert str(found)
        assert model.odd is odd
        assert kind == "meta" or bool((odd == 2.0).all())


@pytest.mark.parametrize("kind", ["expanded", "inference"])
def test_levels_are_compared_with_such_buffers(kind: str) -> None:
    model = Buffers(kind)
    compared = compare_levels(model, lambda model: model(torch.ones(2, 4)).float().square().mean(), "O1")
    assert compared.loss_error < 0.01
    assert bool((model.odd == 2.0).all())
