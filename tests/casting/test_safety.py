"""Function casts in many threads and processes, and after errors: nothing is lost, left over or left off."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, Dataset

from amp_engine import amp
from amp_engine.casting import FunctionCasts, locks
from amp_engine.casting.regions import float_region
from amp_engine.levels import report
from tests.models import MLP
from tests.support import backward, train

X = torch.eye(4)
WAIT = 60.0  # seconds until a deadlock is called one
after_steps = optimizers.register_optimizer_step_post_hook
MM, LINEAR, MATMUL = torch.mm, F.linear, Tensor.matmul


def in_threads(*targets: Callable[[], Any]) -> list[Any]:
    """Results of functions that run at once, each in a thread of its own; the first error is raised here."""
    with ThreadPoolExecutor(len(targets)) as pool:
        futures = [pool.submit(target) for target in targets]
        return [future.result(WAIT) for future in futures]


# --- threads --------------------------------------------------------------------------------------
# What needs luck is in tests/stress.


def test_a_call_keeps_the_casts_that_it_began_under(casts: FunctionCasts) -> None:
    """Freeing a tensor in the midst of a call may switch casts off, as other threads may."""
    layer = nn.Linear(4, 4)
    freed = []

    def switch_off(alias: Any) -> None:
        freed.append(alias)
        casts.switch(on=False)

    alias = weakref.ref(casts.cache.cast(layer.weight, casts.dtype), switch_off)
    assert alias() is not None  # kept by the cache, until the weight is seen to be another
    with torch.no_grad():
        layer.weight.copy_(2.0 * X)
        layer.bias.fill_(1.0)
    assert not freed
    output = F.linear(X, layer.weight, layer.bias)
    assert freed == [alias]
    assert output.dtype == casts.dtype
    assert torch.equal(output.float(), 2.0 * X + 1.0)
    assert torch.mm(X, X).dtype == torch.float32


def test_a_list_that_changes_while_it_is_cast_is_cast_as_it_was(casts: FunctionCasts) -> None:
    weights: list[Any] = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.full((2, 2), 2.0))]

    def change(alias: Any) -> None:
        weights[1] = None

    alias = weakref.ref(casts.cache.cast(weights[0], casts.dtype), change)
    with torch.no_grad():
        weights[0].fill_(3.0)
    product = torch.linalg.multi_dot(weights)
    assert alias() is None
    assert weights[1] is None
    assert product.dtype == casts.dtype
    assert product.eq(12.0).all()


def test_casts_that_go_while_arguments_are_looked_at_are_gone(casts: FunctionCasts) -> None:
    class Asked(type):
        def __getattr__(cls, name: str) -> Any:
            if name == "__torch_function__":
                casts.switch(on=False)
            raise AttributeError(name)

    class Number(float, metaclass=Asked):
        pass

    assert torch.addmm(X, X, X, beta=1.0).dtype == casts.dtype
    assert torch.addmm(X, X, X, beta=Number(1.0)).dtype in (torch.float32, casts.dtype)
    assert torch.mm(X, X).dtype in (torch.float32, casts.dtype)


def test_one_engine_takes_models_in_from_two_threads_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    engine, initialization, second_came = amp.current_engine(), report.initialization, threading.Event()
    came: list[int] = []

    def past_the_checks(*args: Any) -> Any:
        came.append(threading.get_ident())
        if len(came) == 2:
            second_came.set()
        elif second_came.wait(0.2):  # which would have checked before this one is added
            raise AssertionError(came)
        return initialization(*args)

    def run() -> nn.Module:
        model = nn.Linear(4, 4)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O4", verbosity=0)
        return model

    monkeypatch.setattr(report, "initialization", past_the_checks)
    models = in_threads(run, run)
    assert all(model(X).dtype == torch.bfloat16 for model in models)
    amp.close()
    assert torch.mm is MM


@pytest.mark.parametrize("what", ["clear", "run"])
def test_copies_may_be_dropped_in_the_midst_of_a_call(what: str, casts: FunctionCasts) -> None:
    """Freeing a tensor lets others run, in the middle of whatever freed it."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)), torch.ones(1, 2)
    freed: list[Any] = []
    calls: dict[str, Callable[[], Any]] = {
        "clear": casts.cache.clear,
        "run": lambda: model(x),
    }

    def run(alias: Any) -> None:
        freed.append(alias)
        calls[what]()

    alias = weakref.ref(casts.cache.cast(model[0].weight, casts.dtype), run)
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    during = model(x).detach()
    assert freed == [alias]
    assert torch.equal(during, model(x).detach())


def test_disable_casts_of_several_threads_ends_with_the_last(casts: FunctionCasts) -> None:
    barrier = threading.Barrier(4)

    def run() -> None:
        for _ in range(2):
            barrier.wait(WAIT)
            with casts.disabled():
                barrier.wait(WAIT)
                assert torch.mm(X, X).dtype == torch.float32

    in_threads(*[run] * 4)
    assert torch.mm(X, X).dtype == casts.dtype


def test_a_thread_that_is_running_sees_disable_casts_of_another() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    barrier = threading.Barrier(2)

    def watch() -> list[torch.dtype]:
        seen = []
        for _ in range(3):
            barrier.wait(WAIT)
            seen.append((X @ X).dtype)
            barrier.wait(WAIT)
        return seen

    def switch() -> None:
        for context in (contextlib.nullcontext(), amp.disable_casts(), contextlib.nullcontext()):
            with context:
                barrier.wait(WAIT)
                barrier.wait(WAIT)

    seen, _ = in_threads(watch, switch)
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_a_step_in_one_thread_leaves_the_casts_of_another_on() -> None:
    inside, looked = threading.Event(), threading.Event()
    types: dict[str, torch.dtype] = {}

    class SlowSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if any(group["params"] for group in self.param_groups):  # not amp's own call with nothing to step
                types["step"] = torch.mm(X, X).dtype
                inside.set()
                assert looked.wait(WAIT)
            return super().step(closure)

    model = MLP.model()
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    backward(MLP.loss(model, MLP.batch()), optimizer)

    def look() -> None:
        assert inside.wait(WAIT)
        types["other thread"] = model(MLP.batch()[0]).dtype
        looked.set()

    in_threads(optimizer.step, look)
    assert types == {"step": torch.float32, "other thread": torch.float16}
    assert torch.mm(X, X).dtype == torch.float16


# --- autograd's threads ---------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """x @ w, with a backward that calls listed functions and notes their types."""

    seen: list[torch.dtype] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        Product.seen.append(torch.mm(w.detach(), x).dtype)
        grad = grads[0].to(x.dtype)
        return torch.mm(grad, w.t()).to(x.dtype), torch.mm(x.t(), grad).to(w.dtype)


def test_a_backward_in_another_thread_casts_and_heeds_disable_casts(casts: FunctionCasts) -> None:
    for off, dtype in ((False, casts.dtype), (True, torch.float32), (False, casts.dtype)):
        Product.seen.clear()
        w = X.clone().requires_grad_()
        output = Product.apply(X, w)
        if off:
            with casts.disabled():
                in_threads(output.sum().backward)
        else:
            in_threads(output.sum().backward)
        assert Product.seen == [dtype]
        assert torch.equal(w.grad, torch.ones(4, 4))


# --- processes ------------------------------------------------------------------------------------


class Squares(Dataset[Tensor]):
    """Items made by listed functions."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([index * X, F.softmax(X, -1)]).matmul(X)


def reported(queue: Any, run: Callable[[], Any]) -> None:
    """Send what `run` returns, or its traceback."""
    try:
        queue.put(("result", pickle.dumps(run())))
    except BaseException:
        queue.put(("error", traceback.format_exc()))


def result_of(queue: Any) -> Any:
    kind, value = queue.get(timeout=WAIT)
    assert kind == "result", value
    return pickle.loads(value)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_workers_of_a_loader_that_are_forked_have_the_casts() -> None:
    amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
    (batch,) = DataLoader(Squares(), batch_size=8, num_workers=1, multiprocessing_context="fork")
    assert batch.dtype == torch.float16
    for index, item in enumerate(batch):
        torch.testing.assert_close(item[0].float(), index * X)
        torch.testing.assert_close(item[1].float(), torch.softmax(X, -1), rtol=1e-3, atol=1e-3)


def in_a_fork(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    before = torch.mm(X, X).dtype
    losses = train(MLP, model, optimizer, "cocc")
    with amp.disable_casts():
        off = torch.mm(X, X).dtype
    amp.close()
    pristine = (torch.mm, F.linear, Tensor.matmul) == (MM, LINEAR, MATMUL)
    after = model(MLP.batch()[0]).dtype
    fresh = MLP.model()
    amp.initialize(fresh, opt_level="O4", verbosity=0)
    return [before, off, pristine, after, fresh(MLP.batch()[0]).dtype, losses[-1] < losses[0]]


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="torch refuses a backward in a fork beside a device's thread"
)
def test_a_fork_trains_closes_and_starts_anew_and_its_parent_feels_nothing() -> None:
    model = MLP.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    train(MLP, model, optimizer, "cc")
    context = mp.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=reported, args=(queue, lambda: in_a_fork(model, optimizer)), daemon=True)
    child.start()
    low, full = torch.float16, torch.float32
    assert result_of(queue) == [low, full, True, full, torch.bfloat16, True]
    child.join(WAIT)
    assert child.exitcode == 0
    assert model(MLP.batch()[0]).dtype == torch.float16
    losses = train(MLP, model, optimizer, "ccc", first=2)
    assert all(loss == loss for loss in losses)  # noqa: PLR0124


def test_a_fork_inside_of_disable_casts_stays_disabled_until_it_is_left() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
    reader, writer = os.pipe()
    with amp.disable_casts():
        pid = os.fork()
        if pid == 0:  # the child: leaves the context, too, and reports
            inside = torch.mm(X, X).dtype
    if pid == 0:
        os.write(writer, repr((inside, torch.mm(X, X).dtype)).encode())
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "(torch.float32, torch.bfloat16)"
    assert status == 0


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_fork_waits_for_a_thread_that_holds_the_lock_of_the_casts(casts: FunctionCasts) -> None:
    """No lock of the casts may be held by a thread that the child does not have."""
    taken, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with locks.shared:
            taken.set()
            forked.wait(0.2)  # which a fork that waits, as it must, does not reach before

    def fork() -> int:
        assert taken.wait(WAIT)
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(WAIT))  # ends a child that waits for ever
            with casts.disabled():
                full = torch.mm(X, X).dtype == torch.float32
            os._exit(0 if full else 1)
        forked.set()
        return os.waitpid(pid, 0)[1]

    assert in_threads(hold, fork)[1] == 0


class Activated(nn.Module):
    """Keeps patched functions, a builtin and a Python one, as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.activation, self.product = F.gelu, torch.mm

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.activation(self.linear(x)), X)


def in_a_spawned_process(rank: int, path: str, model: nn.Module) -> None:
    pristine = torch.mm(X, X).dtype == torch.float32 and type(torch.mm) is type(len)
    plain = model(X).dtype
    model = MLP.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    train(MLP, model, optimizer, "cc")
    low = model(MLP.batch()[0]).dtype
    amp.close()
    Path(path).write_text(repr((rank, pristine, plain, low, torch.mm(X, X).dtype)))


def test_a_spawned_process_gets_a_model_built_while_patched_and_starts_without_casts(tmp_path: Path) -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    model = Activated()
    assert model(X).dtype == torch.float16
    model(X).float().sum().backward()
    mp.spawn(in_a_spawned_process, args=(str(tmp_path / "child"), model), nprocs=1)
    expected = (0, True, torch.float32, torch.bfloat16, torch.float32)
    assert (tmp_path / "child").read_text() == repr(expected)
    assert model(X).dtype == torch.float16


# --- errors and references ------------------------------------------------------------------------

REPEATS = 1000

A, B, OUT, ROW = torch.ones(3, 2), torch.ones(3, 3), torch.empty(3, 3), torch.ones(3)
LISTS = [A, torch.ones(3, 5)]
HALF_LISTS = [A.to(torch.bfloat16), torch.ones(2, 5)]
NUMBERS = [1, "text"]

# Calls that fail or not, with the objects that they are given.
CALLS: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "mm, wrong shapes": (lambda: torch.mm(A, A), [A]),
    "mm, wrong keyword": (lambda: torch.mm(A, other=B), [A, B]),
    "mm, right": (lambda: torch.mm(B, B), [B]),
    "mm, right keyword": (lambda: torch.mm(B, mat2=B), [B]),
    "mm, out": (lambda: torch.mm(B.double(), B, out=OUT), [B, OUT]),
    "mm, right out": (lambda: torch.mm(B, B, out=OUT), [B, OUT]),
    "linear, wrong shapes": (lambda: F.linear(A, B, bias=ROW), [A, B, ROW]),
    "linear, right": (lambda: F.linear(B, B, bias=ROW), [B, ROW]),
    "matmul, method": (lambda: A.matmul(A), [A]),
    "matmul, operator": (lambda: A @ A, [A]),
    "add, operator, a string": (lambda: A + "text", [A]),
    "add, wrong shapes": (lambda: torch.add(HALF_LISTS[0], B), [HALF_LISTS[0], B]),
    "add_, wrong shapes": (lambda: A.add_(torch.ones(7)), [A]),
    "softmax, wrong dim": (lambda: F.softmax(HALF_LISTS[0], dim=9), [HALF_LISTS[0]]),
    "softmax, right": (lambda: F.softmax(HALF_LISTS[0], dim=1), [HALF_LISTS[0]]),
    "exp, method": (lambda: HALF_LISTS[0].exp("text"), [HALF_LISTS[0]]),
    "cat, wrong shapes": (lambda: torch.cat(LISTS), [LISTS, *LISTS]),
    "cat, mixed types": (lambda: torch.cat(HALF_LISTS), [HALF_LISTS, *HALF_LISTS]),
    "cat, right": (lambda: torch.cat([HALF_LISTS[0], A]), [HALF_LISTS[0], A]),
    "cat, no tensors": (lambda: torch.cat(NUMBERS), [NUMBERS]),
    "cat, wrong keyword": (lambda: torch.cat(tensors=LISTS, dim=7), [LISTS, *LISTS]),
    "einsum, wrong shapes": (lambda: torch.einsum("ij,jk", A, A), [A]),
    "layer_norm": (lambda: F.layer_norm(A, (7,), weight=ROW), [A, ROW]),
    "exp_": (lambda: torch.exp_(HALF_LISTS[0].half()), [HALF_LISTS[0]]),
}


@pytest.mark.parametrize(("call", "given"), CALLS.values(), ids=CALLS)
def test_a_call_leaves_no_reference_behind(call: Callable[[], Any], given: list[Any], casts: FunctionCasts) -> None:
    def run() -> None:
        with contextlib.suppress(RuntimeError, TypeError, IndexError, NotImplementedError):
            call()

    run()
    before = [sys.getrefcount(value) for value in given]
    for _ in range(REPEATS):
        run()
    after = [sys.getrefcount(value) for value in given]
    assert max(b - a for a, b in zip(before, after, strict=True)) < REPEATS // 10


def test_calls_leak_no_string_dtype_or_none(casts: FunctionCasts) -> None:
    key, weight = "a keyword nobody knows", nn.Parameter(torch.ones(3, 3))

    def run() -> None:
        for keywords in ({key: 1}, {"bias": None}):
            with contextlib.suppress(TypeError):
                F.linear(B, weight, **keywords)

    run()
    values = (key, weight, casts.dtype, casts, casts.cache)
    before = [sys.getrefcount(value) for value in values]
    for _ in range(REPEATS):
        run()
    after = [sys.getrefcount(value) for value in values]
    assert max(b - a for a, b in zip(before, after, strict=True)) < REPEATS // 10


def test_an_error_in_a_patched_function_leaves_casts_on_and_the_next_call_right(casts: FunctionCasts) -> None:
    for call in (lambda: torch.mm(A, A), lambda: F.softmax(A.to(casts.dtype), 9), lambda: A @ A, lambda: torch.cat([])):
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            call()
        assert torch.mm(B, B).dtype == casts.dtype
        assert casts.is_active
    with pytest.raises(ZeroDivisionError), casts.disabled():
        1 / 0  # noqa: B018
    with pytest.raises(ZeroDivisionError), float_region():
        1 / 0  # noqa: B018
    assert torch.mm(B, B).dtype == casts.dtype


def test_a_call_within_a_call_has_arguments_of_its_own(casts: FunctionCasts) -> None:
    """A hook on saved tensors makes the inner call, with as many arguments: any storage for them would be shared."""
    x, y, weight = torch.full((2, 2), 2.0), torch.full((2, 2), 3.0), nn.Parameter(torch.ones(2, 2))
    within: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        within.extend((torch.mm(x, y), F.linear(y, x)))
        return saved

    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            result = torch.mm(torch.full((2, 2), 5.0), weight)
            result = F.linear(result.float(), weight)
        result.sum().backward()
        assert result.eq(20.0).all()
        assert all(product.eq(12.0).all() for product in within)
    assert torch.equal(weight.grad, torch.full((2, 2), 60.0 + 60.0))


def test_no_half_made_object_is_left_where_collectors_look(casts: FunctionCasts) -> None:
    held = []
    for _ in range(3):
        assert torch.mm(A, A.t()).dtype == casts.dtype
        assert A.cumsum(0).dtype == torch.float32
        tuples = [o for o in gc.get_objects() if type(o) is tuple and len(o) < 6]
        held.append([o for o in tuples if len(o) == 2 and all(item is None for item in o)])
        assert sum(hash(type(item)) != 0 for o in tuples for item in o) > 0
        gc.collect()
    torch.mm(A, A.t())
    assert all(item is None for some in held for o in some for item in o)


def test_an_error_raised_by_an_argument_of_a_call_reaches_the_caller(casts: FunctionCasts) -> None:
    class Failing(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise KeyError("mine")

    failing = torch.ones(2, 2).as_subclass(Failing)
    for call in (lambda: torch.mm(failing, X), lambda: torch.cat([failing, X]), lambda: X.matmul(failing)):
        with pytest.raises(KeyError, match="mine"):
            call()
    assert torch.mm(X, X).dtype == casts.dtype
