"""`amp.find_overflow`: the operation is named, and everything is as it was before."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine import AmpStateError, AmpTypeError, Engine
from amp_engine.tools.telemetry.gradient_histogram import gradient_histogram
from amp_engine.tools.telemetry.gradient_watch import GradientWatch
from amp_engine.tools.telemetry.step_times import StepTimes
from tests.models import NORMED_MLP
from tests.support import DYNAMIC_LEVELS, LEVELS, assert_bitwise
from tests.tools.diagnosis.test_post_mortem import Run, closes  # noqa: F401  (a fixture)
from tests.tools.telemetry.plants import LAYERS


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_operation_and_its_module_are_named(level: str, kind: str) -> None:
    run = Run(level, kind, skip_on_overflow=False)
    run.step()
    for bad in ("backward", "forward", ""):
        run.model.planted.bad = bad
        found = run.engine.find_overflow(run.backward)
        assert found.phase == (bad or None), str(found)
        if bad:
            assert found.operation == {"backward": "BackwardOverflow", "forward": "mul"}[bad]
            assert (found.module, found.module_type) == ("planted", "Planted")
            assert found.kind == "inf"
            assert found.elements == found.numel > 0
            assert found.largest_input is not None
            assert f"{found.operation} in planted (Planted)" in str(found)
        else:
            assert "Everything is finite" in str(found)
            assert found.loss is not None


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


class Everything(nn.Module):
    """A linear layer, dropout and batch norm, with what `bad` says in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.bad = ""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.first(x)), 0.5)
        if self.bad == "mask":  # as attention does: -inf is meant
            mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
            scores = (x.unsqueeze(2) * x.unsqueeze(1)).masked_fill(mask, float("-inf"))
            x = (scores.softmax(-1) @ x.unsqueeze(2)).squeeze(2)
        if self.bad == "masked row":
            x = x + x.masked_fill(torch.ones(8, dtype=torch.bool), float("-inf")).softmax(-1)
        if self.bad == "log":
            x = (x - x).log()
        if self.bad == "hook" and x.requires_grad:
            x.register_hook(lambda grad: grad * float("nan"))
        if self.bad == "sum" and x.requires_grad:
            # Each of the two is finite, and their sum in float16 is not.
            x = _Large.apply(x) + _Large.apply(x)
        return self.last(x)


class _Large(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.full_like(grad, 0.75 * torch.finfo(grad.dtype).max)


@pytest.mark.parametrize(
    ("bad", "phase", "operation"),
    [
        ("mask", None, None),
        ("masked row", "forward", "_softmax"),
        ("log", "forward", "log"),
        ("hook", "backward", "a sum of gradients, or a hook, before"),
        ("sum", "backward", "a sum of gradients, or a hook, before"),
    ],
)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_what_is_meant_and_what_is_not(level: str, bad: str, phase: str | None, operation: str | None) -> None:
    torch.manual_seed(0)
    with Engine() as engine:
        model = Everything()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        model.bad = bad
        x = torch.randn(4, 4)
        found = engine.find_overflow(lambda: model(x).float().square().mean(), loss_scale=64.0)
        assert found.phase == phase, str(found)
        if operation is not None:
            assert found.operation is not None
            assert found.operation.startswith(operation)
            assert found.module == ""
            assert "the model itself (Everything)" in str(found)


@pytest.mark.parametrize("bad", ["", "log", "sum"])
@pytest.mark.parametrize("level", LEVELS)
def test_everything_is_as_before(level: str, bad: str) -> None:
    runs: list[Any] = []
    tensors: list[list[Any]] = []
    for looks in (False, True):
        torch.manual_seed(0)
        engine = Engine()
        model = Everything()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        for index in range(4):
            x = torch.randn(4, 4)
            if looks:
                model.bad = bad

                def step(
                    engine: Engine = engine, model: nn.Module = model, x: Tensor = x, optimizer: Any = optimizer
                ) -> None:
                    optimizer.zero_grad()
                    with engine.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
                        scaled_loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()

                engine.find_overflow(step, loss_scale=2.0**20)
                model.bad = ""
            optimizer.zero_grad()
            with engine.scale_loss(model(x).float().square().mean(), optimizer, loss_id=0) as scaled_loss:
                (scaled_loss * (float("inf") if index == 1 and level in DYNAMIC_LEVELS else 1.0)).backward()
            optimizer.step()
        report = [(r.backward, r.cause, r.loss_scale) for r in engine.overflow_report()]
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        runs.append((report, hooks, engine.state_dict()))
        tensors.append([*model.state_dict().values(), *state_of(optimizer), torch.get_rng_state()])
        engine.close()
    assert runs[0] == runs[1]
    for plain, looked in zip(*tensors, strict=True):
        assert_bitwise(plain, looked)


def test_gradients_that_are_there_stay() -> None:
    run = Run("O1", "linear")
    run.step()  # leaves what zero_grad has not taken
    before = {name: p.grad for name, p in run.model.named_parameters()}
    copies = {name: None if grad is None else grad.clone() for name, grad in before.items()}
    run.engine.find_overflow(run.backward)
    for name, p in run.model.named_parameters():
        assert p.grad is before[name]
        grad, copied = p.grad, copies[name]
        assert (grad is None) == (copied is None)
        assert grad is None or copied is None or torch.equal(grad, copied)


def test_it_runs_at_the_scale_that_overflowed() -> None:
    with Engine() as engine:
        model = NORMED_MLP.model(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level="O2", verbosity=0)
        engine.scalers[0]._loss_scale = 2.0**24
        x = NORMED_MLP.batch(0)

        def loss() -> Tensor:
            return NORMED_MLP.loss(model, x)

        with engine.scale_loss(loss(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        (record,) = engine.overflow_report()
        assert record.loss_scale == 2.0**24
        found = engine.find_overflow(loss)
        assert found.phase == "backward", str(found)
        assert found.loss_scale == 2.0**24
        assert engine.scalers[0].loss_scale() == 2.0**23
        assert engine.find_overflow(loss, loss_scale=1.0).phase is None


def test_a_scale_that_takes_a_finite_loss_beyond_float32_is_named() -> None:
    with Engine() as engine:
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level="O2", verbosity=0)
        x = torch.randn(16, 8)
        found = engine.find_overflow(lambda: (model(x) * 1e18).square().sum())
        assert (found.phase, found.operation) == ("backward", "mul"), str(found)


def test_a_weight_is_named_before_anything_else() -> None:
    run = Run("O1", "linear")
    with torch.no_grad():
        run.model.planted.layer.weight[0, 0] = float("inf")
    found = run.engine.find_overflow(run.backward)
    assert (found.phase, found.parameter, found.elements) == ("weights", "planted.layer.weight", 1)


def test_what_raises_leaves_no_trace() -> None:
    run = Run("O2", "linear")

    def fails() -> None:
        run.backward()
        raise KeyError("no batch")

    with pytest.raises(KeyError, match="no batch"):
        run.engine.find_overflow(fails)
    run.step()
    assert len(run.engine.overflow_report()) == 0
    assert run.engine.find_overflow(run.backward).phase is None


@pytest.mark.parametrize("level", LEVELS)
def test_sparse_gradients_are_looked_at(level: str) -> None:
    with Engine() as engine:
        model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        words = torch.tensor([1, 2, 2, 5])
        assert engine.find_overflow(lambda: model(words).float().square().mean(), loss_scale=1.0).phase is None
        # Once in `words`, twice: each of the two is finite, and their sum is not.
        largest = torch.finfo(model[0].weight.dtype).max

        class Large(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                return torch.full_like(grads[0], 0.75 * largest)

        found = engine.find_overflow(lambda: model[1](Large.apply(model[0](words))).float().mean())
        assert (found.phase, found.module, found.operation) == ("backward", "0", "embedding"), str(found)
        assert found.parameter == "0.weight"
        assert (found.kind, found.elements, found.numel) == ("inf", 4, 12)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_of_the_forward_are_looked_at(layout: torch.layout) -> None:
    with Engine() as engine:
        model = nn.Linear(4, 2)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", verbosity=0)
        for bad in (False, True):
            dense = torch.eye(4)
            dense[0, 0] = float("nan") if bad else 1.0
            graph = dense.to_sparse(layout=layout)
            found = engine.find_overflow(lambda graph=graph: model(torch.sparse.mm(graph, torch.ones(4, 4))).mean())
            assert found.phase == ("data" if bad else None), str(found)
            if bad:
                assert (found.kind, found.elements, found.numel) == ("nan", 1, 4)


@pytest.mark.parametrize("bad", ["", "forward", "backward", "raises"])
def test_the_graph_of_the_batch_goes(bad: str) -> None:
    run = Run("O2", "linear")
    run.model.planted.bad = "" if bad == "raises" else bad
    hooks, calls = weakref.WeakSet[Any](), itertools.count()  # neither is put back

    def step() -> Tensor:
        class Hook:
            def __call__(self, grad: Tensor) -> None:
                """Belongs to the graph."""

        x, y = run.batch
        output = run.model(x)
        hook = Hook()
        output.register_hook(hook)
        hooks.add(hook)
        next(calls)
        if bad == "raises":
            raise KeyError
        return F.mse_loss(output.float(), y)

    if bad == "raises":
        with pytest.raises(KeyError):
            run.engine.find_overflow(step)
    else:
        assert run.engine.find_overflow(step).phase == (bad or None)
    gc.collect()
    assert (next(calls), len(hooks)) == (1, 0)


def test_refusals() -> None:
    engine = Engine()
    with pytest.raises(AmpStateError, match=r"amp.initialize\(\) was not, or with enabled=False"):
        engine.find_overflow(lambda: None)
    run = Run("O2", "linear")
    with pytest.raises(AmpTypeError, match=r"not a Tensor.*lambda: loss_fn"):
        run.engine.find_overflow(torch.ones(()))  # type: ignore[arg-type]
    run.batch = (torch.ones(2, 4), torch.ones(2, 2))
    run.backward()
    with pytest.raises(AmpStateError, match=r"wait for SGD.step"):
        run.engine.find_overflow(run.backward)
    run.optimizer.step()
    with (
        run.engine.scale_loss(torch.ones((), requires_grad=True), run.optimizer),
        pytest.raises(AmpStateError, match="inside of"),
    ):
        run.engine.find_overflow(run.backward)


@pytest.mark.parametrize("kind", ["nothing", "no return", "no grad", "a number", "no backward inside"])
def test_a_batch_without_a_backward_is_refused(kind: str) -> None:
    run = Run("O2", "linear")
    x, y = run.batch

    def loss() -> Tensor:
        return F.mse_loss(run.model(x).float(), y)

    def step() -> Any:
        if kind == "no return":
            loss()
        if kind == "no grad":
            with torch.no_grad():
                return loss()
        if kind == "a number":
            return loss().item()
        if kind == "no backward inside":
            with run.engine.scale_loss(loss(), run.optimizer):
                pass
        return None

    with pytest.raises(AmpStateError, match=r"saw no gradient.*Call amp.find_overflow\(lambda: loss_fn"):
        run.engine.find_overflow(step)
    assert run.engine.find_overflow(loss).phase is None
    run.model.planted.bad = "forward"
    if kind != "nothing":  # which is found without a backward
        assert run.engine.find_overflow(step).phase == "forward"
    run.step()


def test_a_loss_that_is_a_parameter_has_a_gradient() -> None:
    with Engine() as engine:
        model = nn.ParameterList([nn.Parameter(torch.ones(()))])
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", verbosity=0)
        assert engine.find_overflow(lambda: model[0]).phase is None


def test_without_levels_there_is_nothing_to_look_at() -> None:
    with Engine() as engine:
        model = nn.Linear(4, 2)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), enabled=False)
        with pytest.raises(AmpStateError, match=r"with enabled=False.  Call model, optimizer = amp.initialize"):
            engine.find_overflow(lambda: model(torch.ones(2, 4)).sum())


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("kind", ["Parameter 0.weight", "Buffer 1.running_mean"])
def test_lazy_modules_are_run_first(level: str, kind: str) -> None:
    lazy = nn.LazyLinear(4) if kind.startswith("P") else nn.Linear(2, 4)
    model = nn.Sequential(lazy, nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 1))
    x = torch.randn(3, 2)
    with Engine() as engine:
        engine.initialize(model, torch.optim.SGD(model[2].parameters(), lr=0.1), opt_level=level, verbosity=0)
        with pytest.raises(
            AmpStateError, match=rf"{kind} of Sequential has no shape yet .*then call amp.find_overflow"
        ):
            engine.find_overflow(lambda: model(x).float().sum())
        with torch.no_grad():
            model(x)
        assert engine.find_overflow(lambda: model(x).float().sum(), loss_scale=1.0).phase is None


@pytest.mark.parametrize("look", ["find_overflow", "gradient_histogram"])
def test_a_batch_may_run_a_copy_of_the_model(look: str) -> None:
    with Engine() as engine:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
        x = torch.ones(2, 3)

        def batch() -> Tensor:
            loss = model(x)
            return (loss + copy.deepcopy(model)(x)).sum()  # as for a target network

        looked = engine.find_overflow(batch) if look == "find_overflow" else gradient_histogram(engine, batch)
        assert str(looked)


def test_gradients_may_be_watched_inside_of_a_batch_that_is_looked_at() -> None:
    with Engine() as engine:
        model = nn.Linear(3, 1)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)

        def batch() -> Tensor:
            with GradientWatch(engine):
                return model(torch.ones(2, 3)).sum()

        assert "finite" in str(engine.find_overflow(batch))


@pytest.mark.parametrize("kind", [GradientWatch, StepTimes])
def test_what_was_watched_is_free_at_once(kind: Any) -> None:
    with Engine() as engine:
        model = nn.Linear(3, 1)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
        gc.disable()
        try:
            with kind(engine) as watch:
                pass
            ref = weakref.ref(watch)
            del watch
            assert ref() is None
        finally:
            gc.enable()


class Positions(nn.Module):
    """A linear layer, a bias from constants, and what `bad` says."""

    def __init__(self, bad: str) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.bad = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2), bad

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        far = torch.arange(8.0).log()  # -inf at 0, as the position buckets of T5 have it
        bias = torch.where(torch.arange(8) < 1, torch.zeros(8), far)
        x = self.norm(self.first(x + 0.0 * unused.nan_to_num())) + bias.to(self.last.weight.dtype)
        if self.bad == "forward":
            x = x * 1e38 * 10.0
        if self.bad == "where":
            x = torch.where(x > 1e9, (x - x).sqrt(), x)
        if self.bad == "log":
            x = (x - x).log() * 0.0
        return self.last(x).float().square().mean()


def found_in(bad: str, spoil: str = "", level: str = "O0") -> Any:
    with Engine() as engine:
        model = Positions(bad)
        engine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
        unused = torch.ones(4, 4)
        if spoil == "input":
            unused[0, 0] = float("nan")
        elif spoil:
            model.norm.running_mean[2] = float("nan")
            model.train(spoil == "train")
        return engine.find_overflow(lambda: model(torch.randn(4, 4), unused), loss_scale=1.0)


def test_a_value_that_the_loss_does_not_depend_on_is_no_overflow() -> None:
    found = found_in("")
    assert (found.phase, found.unused.operation, found.unused.elements) == (None, "log", 1)
    assert str(found).startswith("The loss and each gradient are finite.  The loss is ")
    assert "On the way log in the model itself (Positions) gave inf in 1 of 8 elements (float32): " in str(found)


def test_an_input_that_is_not_used_is_no_overflow() -> None:
    found = found_in("", "input")
    assert (found.phase, found.unused.phase) == (None, "data")
    assert "On the way the model itself (Positions) was given nan in 1 of 16 elements" in str(found)


@pytest.mark.parametrize("bad", ["forward", "log"])
def test_the_place_that_the_loss_came_from_is_named_and_no_earlier_one(bad: str) -> None:
    found = found_in(bad)
    assert (found.phase, found.operation) == ("forward", {"forward": "mul", "log": "log"}[bad])
    assert found.numel == 32, "the log of constants has 8"


def test_an_undefined_derivative_of_a_finite_loss_is_backward() -> None:
    found = found_in("where")
    assert (found.phase, found.operation) == ("backward", "sqrt")
    assert found.loss is not None
    assert found.loss == found.loss


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_buffer_that_is_not_finite_is_named(mode: str, level: str) -> None:
    found = found_in("", mode, level)
    assert (found.phase, found.parameter, found.kind) == ("buffers", "norm.running_mean", "nan")
    assert str(found).startswith("buffers: norm.running_mean holds nan in 1 of 8 elements (float32).")
    assert found.loss is not None
    assert (found.loss == found.loss) == (mode == "train")
