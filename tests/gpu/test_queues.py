"""Launches, host syncs, CUDA graphs, streams and devices."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_engine import Engine, kernels
from amp_engine.kernels import choice
from tests.gpu.support import (
    GPU,
    GPUS,
    STANDS_IN,
    assert_same_bits,
    calls,
    captured,
    cuda,
    launches,
    needs_queue,
    needs_two_gpus,
    no_sync,
    on_gpu,
    randn,
)
from tests.gpu.test_steps import BASE, CASES, INV_SCALE, problem

pytestmark = pytest.mark.cuda

CHECK_LAUNCHES = 2  # each chunk, all; tests/cuda_simulator counts them too
STEP_LAUNCHES = 2  # once a tensor, once a chunk
ENGINE_LAUNCHES = CHECK_LAUNCHES + STEP_LAUNCHES
WARM_UP = 67  # in its first 64 steps an engine looks for writes through `.data`, at a parameter each


class Tensors(torch.nn.Module):
    """Parameters without a forward."""

    def __init__(self, count, numel):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(numel) for _ in range(count))


class Iteration:
    """An iteration at O2 with `count` parameters, in two parts. Gradients are handed over, not computed."""

    def __init__(self, engine, count):
        model = Tensors(count, 100).to(GPU)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.engine = engine
        engine.initialize(model, self.optimizer, opt_level="O2", verbosity=0, loss_scale="dynamic")
        self.params = list(model.parameters())
        self.gradients = [torch.randn_like(p) for p in self.params]
        self.loss = torch.zeros((), device=GPU, requires_grad=True)
        self.one = torch.ones((), device=GPU)

    def backward(self):
        """Run up to the end of the body of scale_loss, which is returned."""
        self.optimizer.zero_grad()
        context = self.engine.scale_loss(self.loss, self.optimizer)
        torch.autograd.grad(context.__enter__(), self.loss, self.one)
        for p, g in zip(self.params, self.gradients, strict=True):
            p.grad = g
        return context

    def finish(self, context):
        context.__exit__(None, None, None)
        self.engine.clip_grad_norm_(self.optimizer, 1.0)
        self.optimizer.step()


@pytest.mark.parametrize("count", [3, 300, 1_000 if STANDS_IN else 10_000])
def test_a_step_of_the_engine_waits_for_nothing(count):
    with Engine() as engine:
        iteration = Iteration(engine, count)
        before = [p.detach().clone() for p in engine.master_params(iteration.optimizer)]
        for _ in range(3):
            iteration.finish(iteration.backward())
        context = iteration.backward()
        with no_sync():
            iteration.finish(context)
        after = engine.master_params(iteration.optimizer)
        assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True))


class Ops(TorchDispatchMode):
    """Notes the names of torch's operations that may launch kernels: neither memory, nor numbers for the host."""

    FREE = (
        "aten.empty",
        "aten.new_empty",
        "aten.set_",
        "aten._local_scalar_dense",
        "aten.select.int",
        "aten.detach",
        "aten._lazy_clone",
        "profiler.",
    )

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if not name.startswith(self.FREE):
            self.names.append(name)
        return function(*args, **(kwargs or {}))

    def noting(self, function, names):
        """Return a function that notes these names and calls `function`."""

        def call(*args, **kwargs):
            self.names += names
            return function(*args, **kwargs)

        return call


@pytest.mark.skipif(not STANDS_IN, reason="the profiler counts launches where there is a GPU")
@pytest.mark.skipif(not kernels.has_native(GPU), reason="needs compiled kernels")
@pytest.mark.parametrize("count", [3, 300])
def test_an_iteration_is_six_launches(count, monkeypatch):
    """From zero_grad to the step, with clipping, as far as a CPU can tell."""
    with Engine() as engine, Ops() as ops:
        for owner, name, launched in (
            (kernels.ListCheck, "look", CHECK_LAUNCHES),
            (choice.NATIVE["cpu"].StepTable, "step", STEP_LAUNCHES),
        ):
            monkeypatch.setattr(owner, name, ops.noting(getattr(owner, name), [name] * launched))
        iteration = Iteration(engine, count)
        for _ in range(WARM_UP):
            ops.names.clear()
            iteration.finish(iteration.backward())
    scaling = ["aten.mul.Tensor"] * 2  # the loss, and its gradient
    assert ops.names == [*scaling, *["look"] * CHECK_LAUNCHES, *["step"] * STEP_LAUNCHES]


@pytest.mark.skipif(not kernels.has_native(GPU), reason="needs compiled kernels: others compare one by one")
def test_an_optimizers_own_step_is_as_many_operations_for_any_number_of_tensors():
    counts = []
    for count in (3, 30):
        model = Tensors(count, 8).to(GPU)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, foreach=True)
        with Engine() as engine:
            engine.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=8.0)
            for _ in range(2):
                with engine.scale_loss(torch.zeros((), device=GPU), optimizer):
                    for p in model.parameters():
                        p.grad = torch.ones_like(p)
                with Ops() as ops:
                    optimizer.step()
        counts.append(len(ops.names))
    assert counts[0] == counts[1] < 25


@pytest.mark.skipif(not kernels.has_native(GPU), reason="needs compiled kernels")
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="needs storages that call before they are written")
@pytest.mark.parametrize("where", ["default stream", "side stream", "capture"])
@pytest.mark.parametrize("in_bucket", [False, True])
def test_no_gradient_is_copied_on_any_stream_nor_in_a_bucket(where, in_bucket):
    with Engine() as engine:
        iteration = Iteration(engine, 3)
        if in_bucket:
            iteration.gradients = list(torch.cat(iteration.gradients).split(100))

        def body():
            iteration.finish(iteration.backward())

        stream = cuda.default_stream() if where == "default stream" else cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            body()
            with Ops() as ops:
                (captured(body) if where == "capture" else body)()
        cuda.synchronize()
    assert "aten.clone.default" not in ops.names


@needs_queue
@pytest.mark.parametrize("count", [3, 300, 10_000])
def test_a_step_of_the_engine_takes_four_launches_and_no_memory(count):
    with Engine() as engine:
        iteration = Iteration(engine, count)
        for _ in range(WARM_UP):
            iteration.finish(iteration.backward())
        context = iteration.backward()
        cuda.synchronize()  # the numbers of the last step have come: their pinned memory is used again
        names = calls(lambda: iteration.finish(context))
    assert 0 < sum("Launch" in name for name in names) <= ENGINE_LAUNCHES
    assert not [name for name in names if "Malloc" in name or "Free" in name or "HostAlloc" in name]
    assert "cudaStreamSynchronize" not in names
    assert "cudaMemcpy" not in names


def test_gradients_are_given_away_after_a_step_on_another_stream_has_read_them():
    model = Tensors(4, 1 << (12 if STANDS_IN else 22)).to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=1.0)
        before = [master.detach().clone() for master in engine.master_params(optimizer)]
        with engine.scale_loss(torch.zeros((), device=GPU), optimizer):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            cuda._sleep(100_000_000)  # 50 ms, in which what follows would write first
            optimizer.step()
        others = [torch.full_like(p, 7.0) for p in model.parameters()]  # in what the gradients had
        cuda.synchronize()
        after = [p.detach().clone() for p in model.parameters()]
    assert_same_bits(after, [(b - 1.0).half() for b in before])
    assert len(others) == 4


@needs_queue
def test_the_kernels_of_a_step_are_five_for_any_number_of_tensors():
    ours = problem("adam", (31,) * 500).on_gpu()
    table, inv_scale = ours.table(), torch.tensor(INV_SCALE, device=GPU)
    ours.step(table, 0, BASE, inv_scale=inv_scale)
    assert launches(lambda: ours.step(table, 0, BASE, inv_scale=inv_scale)) == STEP_LAUNCHES
    kernels.check(ours.gradients[0])
    assert launches(lambda: kernels.check(ours.gradients[0])) == CHECK_LAUNCHES


@pytest.mark.parametrize(("kind", "h"), CASES)
def test_a_captured_step_is_replayed_and_eager_steps_go_on(kind, h):
    """Eager, captured, three replays, eager with other gradients, one more replay: as the CPU does them one by one."""
    on_cpu = problem(kind, (31, 4096, 40000), momentum=kind != "sgd" or h.momentum != 0)
    ours = on_cpu.on_gpu()
    inv_scale = torch.tensor(INV_SCALE, device=GPU)
    table = ours.table()
    ours.step(table, 0, h, inv_scale=inv_scale)
    replay = captured(partial(ours.step, table, 1, h, inv_scale=inv_scale))
    for _ in range(3):
        replay()
    ours.step(table, 2, h, inv_scale=inv_scale)
    ours.step(table, 2, h, inv_scale=inv_scale)
    replay()
    table = on_cpu.table()
    for k in (0, 1, 1, 1, 2, 2, 1):
        on_cpu.step(table, k, h, inv_scale=torch.tensor(INV_SCALE))
    assert_same_bits(ours.outcome(), on_cpu.outcome())


def test_a_captured_function_reads_tables_that_its_call_left_behind():
    """The tables of kernels.scale_ are gone when the graph is replayed, their memory must not be."""
    x = randn(40000)
    y = on_gpu(x)
    half = torch.tensor(0.5, device=GPU)
    kernels.scale_([y.clone()], [y], half)
    replay = captured(lambda: kernels.scale_([y], [y], half))
    for _ in range(3):
        others = [torch.ones(n, device=GPU) for n in (5, 7)]
        kernels.scale_(others, others, half)
        replay()
    assert_same_bits(y, x / 8)


@pytest.mark.parametrize(("kind", "h"), CASES)
def test_a_captured_step_outlives_its_table(kind, h):
    """The table's memory on the GPU is freed, and used by others when the graph is replayed."""
    on_cpu = problem(kind, (31, 4096, 40000), momentum=kind != "sgd" or h.momentum != 0)
    ours = on_cpu.on_gpu()
    inv_scale = torch.tensor(INV_SCALE, device=GPU)
    table = ours.table()
    ours.step(table, 0, h, inv_scale=inv_scale)
    replay = captured(partial(ours.step, table, 1, h, inv_scale=inv_scale))
    del table
    others = [torch.full((2**k,), 7.0, device=GPU) for k in range(4, 20) for _ in range(20)]
    for _ in range(2):
        replay()
    assert all(other.eq(7.0).all().item() for other in others)
    table = on_cpu.table()
    for k in (0, 1, 1):
        on_cpu.step(table, k, h, inv_scale=torch.tensor(INV_SCALE))
    assert_same_bits(ours.outcome(), on_cpu.outcome())


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_captured_iteration_trains_like_an_eager_one(level):
    """Captured while the host has not heard yet of the last eager step."""
    torch.manual_seed(0)
    x, start = torch.randn(16, 64, device=GPU), torch.nn.Linear(64, 64).state_dict()
    outcomes = []
    for as_a_graph in (False, True):
        model = torch.nn.Linear(64, 64)
        model.load_state_dict(start)
        model.to(GPU)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with Engine() as engine:
            engine.initialize(model, optimizer, opt_level=level, verbosity=0)

            def iteration(late=False, model=model, optimizer=optimizer, engine=engine):
                with engine.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
                    scaled_loss.backward()
                    if late:
                        cuda._sleep(50_000_000)
                optimizer.step()
                optimizer.zero_grad()

            stream = cuda.Stream()
            stream.wait_stream(cuda.current_stream())
            with cuda.stream(stream):
                for late in (False, False, True):
                    iteration(late)
            cuda.current_stream().wait_stream(stream)
            if as_a_graph:
                replay = captured(iteration)
                for _ in range(3):
                    replay()
            else:
                for _ in range(3):
                    iteration()
            iteration()
            outcomes.append([p.detach().float() for p in engine.master_params(optimizer)])
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-3, atol=1e-4)
    assert not torch.equal(outcomes[0][0].cpu(), start["weight"])


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_captured_forward_casts_the_weight_at_each_replay(level):
    model, x = torch.nn.Linear(4, 4, bias=False, device=GPU), torch.ones(1, 4, device=GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    y = torch.zeros(1, 4, device=GPU)
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        model(x)
        replay = captured(lambda: y.copy_(model(x).detach()))
        torch.nn.init.constant_(model.weight, 3.0)
        replay()
    assert y.tolist() == [[12.0] * 4]


def test_addresses_that_change_while_the_host_runs_ahead():
    """Ten steps, each with gradients elsewhere, queued behind a kernel that takes long."""
    on_cpu = problem("adam", (31, 40000))
    ours = on_cpu.on_gpu()
    given = [on_gpu([randn(g.numel(), g.dtype) for g in ours.gradients[0]]) for _ in range(10)]
    table, inv_scale = ours.table(), torch.tensor(INV_SCALE, device=GPU)
    cuda.synchronize()
    cuda._sleep(200_000_000)
    woke = cuda.Event()
    woke.record()
    for gradients in given:
        ours.gradients[0] = gradients
        ours.step(table, 0, BASE, inv_scale=inv_scale)
    assert STANDS_IN or not woke.query()
    table = on_cpu.table()
    for gradients in given:
        on_cpu.gradients[0] = [g.cpu() for g in gradients]
        on_cpu.step(table, 0, BASE, inv_scale=torch.tensor(INV_SCALE))
    assert_same_bits(ours.outcome(), on_cpu.outcome())


def test_work_is_queued_on_the_current_stream():
    x = torch.ones(1 << 20, device=GPU)
    half = torch.tensor(0.5, device=GPU)
    stream = cuda.Stream()
    cuda.synchronize()
    with cuda.stream(stream):
        cuda._sleep(50_000_000)
        x.fill_(4.0)
        kernels.scale_([x], [x], half)
    stream.synchronize()
    assert x.eq(2.0).all().item()


@needs_two_gpus
def test_each_device_has_tables_of_its_own():
    on_cpu = problem("adam", (31, 40000))
    for device in GPUS[:2]:
        ours = on_cpu.on_gpu(device)  # the current device stays the first
        ours.step(ours.table(), 0, BASE, inv_scale=torch.tensor(INV_SCALE, device=device))
        expected = on_cpu.on_gpu(torch.device("cpu"))
        expected.step(expected.table(), 0, BASE, inv_scale=torch.tensor(INV_SCALE))
        assert_same_bits(ours.outcome(), expected.outcome())


@needs_two_gpus
def test_one_list_is_checked_on_two_devices_in_turn():
    halves, list_check = [[randn(40000) for _ in range(2)] for _ in range(2)], kernels.ListCheck()
    for _ in range(3):
        for i, device in enumerate(GPUS[:2]):
            tensors = [on_gpu(half[i], device) if j == i else None for half in halves for j in range(2)]
            scale, found_inf, norm = (torch.tensor(x, device=device) for x in (2.0, 0.0, 0.0))
            list_check.run(tensors, None, scale, found_inf, norm)
            exact = torch.stack([half[i].double().square().sum() for half in halves]).sum().sqrt() / 2
            torch.testing.assert_close(norm.cpu().double(), exact, rtol=1e-6, atol=0.0)
            assert found_inf.item() == 0.0


@needs_two_gpus
def test_one_optimizer_steps_parameters_of_two_devices():
    outcomes = []
    for places in ((0, 0), (0, 1)):
        torch.manual_seed(0)
        model = torch.nn.ModuleList(torch.nn.Linear(8, 8).to(GPUS[place]) for place in places)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with Engine() as engine:
            engine.initialize(model, optimizer, opt_level="O2", verbosity=0)
            for _ in range(3):
                x = torch.ones(4, 8, device=GPU, dtype=torch.float16)
                for layer in model:
                    x = layer(x.to(layer.weight.device))
                with engine.scale_loss(x.float().square().mean(), optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            outcomes.append([p.detach().cpu() for p in engine.master_params(optimizer)])
    assert_same_bits(outcomes[0], outcomes[1])
