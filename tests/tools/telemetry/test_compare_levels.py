"""`amp.compare_levels`: the operation that loses digits is named first, and nothing of the user's is changed."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import queue
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_engine import AmpStateError, AmpTypeError, AmpValueError, Engine, RunPolicy, amp
from amp_engine.tools.diagnosis.relative_error import distance, growth
from amp_engine.tools.telemetry.batch_recording import Follower
from amp_engine.tools.telemetry.comparison import ComparedOperation, LevelComparison
from tests.support import HALF, LEVELS, assert_bitwise
from tests.tools.telemetry.lossy import LOSE, Batch, Block, Model

ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def worst(comparison: LevelComparison) -> ComparedOperation:
    return comparison.operations[0]


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "kind"), [(level, kind) for level, kinds in LOSE.items() for kind in kinds])
def test_what_loses_everything_is_named_first(level: str, kind: str) -> None:
    found = amp.compare_levels(Model(b1=kind), Batch(), level)
    assert (worst(found).module, worst(found).module_type) == ("blocks.1.planted", kind.capitalize())
    assert worst(found).growth > 0.05 / ROUNDOFF[HALF[level]]
    assert worst(found).error_in < 0.05
    assert found.modules[0].module == "blocks.1.planted"
    assert found.roundoff == ROUNDOFF[HALF[level]]
    assert found.dtype == str(HALF[level]).removeprefix("torch.")
    assert found.unmatched == 0
    assert "blocks.1.planted" in str(found).splitlines()[3]
    assert worst(found).operation == {"overflowing": "mul", "softmax": "_softmax"}.get(kind, "sub")
    if kind == "overflowing":
        assert math.isinf(worst(found).error)
        assert math.isinf(worst(found).growth)
    assert 0.25 < max(found.loss_error, found.gradient_error) < 1e3


@pytest.mark.parametrize("level", LEVELS)
def test_where_nothing_is_lost_errors_are_those_of_roundings(level: str) -> None:
    found = amp.compare_levels(Model(), Batch(), level)
    assert found.is_finite
    assert {o.error_in < 0.5 for o in found.operations} == {True}
    if level == "O0":
        assert found.loss_error == found.gradient_error == 0.0
        assert {o.error for o in found.operations} == {0.0}
        assert not any(o.in_low_precision for o in found.operations)
    else:
        u = ROUNDOFF[HALF[level]]
        assert 0.0 < found.gradient_error < 64 * u
        assert found.loss_error < 64 * u
        assert max(o.growth for o in found.operations) < 16
        linear = next(o for o in found.operations if o.module == "first")
        assert 0.0 < linear.error_in <= u
        assert linear.in_low_precision
        assert linear.operation == "addmm"


def test_errors_are_those_of_the_formulas() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3.0

    model = nn.Sequential(nn.Linear(4, 8), Halves())
    x = torch.randn(16, 4)
    found = amp.compare_levels(model, lambda m: m(x).float().sum(), "O5")
    (mul,) = (o for o in found.operations if o.module == "1")
    with torch.no_grad():
        exact = model[0](x)
        half = copy.deepcopy(model[0]).bfloat16()(x.bfloat16())
        error_in = (half.double() - exact.double()).norm() / exact.double().norm()
        error = ((half * 3.0).double() - (exact * 3.0).double()).norm() / (exact * 3.0).double().norm()
    assert mul.error_in == pytest.approx(float(error_in), rel=1e-5)
    assert mul.error == pytest.approx(float(error), rel=1e-5)
    assert mul.growth == pytest.approx(mul.error / max(mul.error_in, 2.0**-8), rel=1e-12)


def test_gradients_of_parameters_are_unscaled() -> None:
    model = Model(b1="cancelling")
    policy = RunPolicy("O2", loss_scale=1024.0)
    found = amp.compare_levels(model, Batch(), policy, RunPolicy("O2", loss_scale=32.0))
    assert found.loss_scale == 1024.0
    assert found.loss_error == 0.0
    assert found.gradient_error < 1e-3  # powers of two scale exactly, but for what underflows
    assert all(p.error < 1e-2 for p in found.parameters if p.norm > 1e-4)
    assert {p.parameter for p in found.parameters} == {name for name, _ in model.named_parameters()}
    assert all((m.gradient_error or 0.0) < 1e-2 for m in found.modules)


class Wrapped(nn.Module):
    """As torch.compile wraps a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


def test_parameters_of_a_compiled_model_have_the_names_of_the_model() -> None:
    model = Model()
    found = amp.compare_levels(Wrapped(model), Batch(), "O5")
    assert {p.parameter for p in found.parameters} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_of_the_outputs_of_modules_are_compared(level: str) -> None:
    class Loses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad if grad.dtype is torch.float32 else torch.zeros_like(grad)

    class Planted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Loses.apply(x) * 1.0

    model = nn.Sequential(nn.Linear(4, 8), Planted(), nn.Linear(8, 2))
    x = torch.randn(16, 4)
    found = amp.compare_levels(model, lambda m: m(x).float().square().mean(), level)
    errors = {m.module: m.gradient_error for m in found.modules}
    assert errors["0"] == 1.0
    assert errors["1"] is not None
    assert errors["1"] < 0.05
    assert [p.parameter for p in found.parameters[:2]] == ["0.weight", "0.bias"]
    assert found.loss_error < 0.05


def test_kept_modules_are_no_longer_named() -> None:
    kept = amp.compare_levels(Model(b1="softmax"), Batch(), RunPolicy("O2", ["blocks.1.planted"]))
    assert kept.keep_float == ("blocks.1.planted",)
    assert worst(kept).growth < 16
    assert kept.gradient_error < 0.05
    assert "with blocks.1.planted in FP32" in str(kept)
    assert next(m for m in kept.modules if m.module == "blocks.1.planted").in_low_precision == 0


def test_what_the_user_kept_is_kept_in_the_copies() -> None:
    model = Model(b1="softmax")
    amp.keep_float(model.blocks[1].planted)  # type: ignore[arg-type]
    assert amp.compare_levels(model, Batch(), "O2").gradient_error < 0.05


def test_random_numbers_are_the_same_whatever_type_they_are_drawn_in() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(x, 0.5) + torch.randn_like(x) + torch.empty_like(x).uniform_()
            x = x * torch.bernoulli(torch.full_like(x, 0.5))
            x = torch.native_dropout(x, 0.25, True)[0] + torch.native_dropout(x, 0.25, False)[0]  # as GPUs do it
            return (
                x
                + torch.randn(x.shape).to(x.dtype)
                + x[torch.randperm(len(x))]
                + random.random()
                + float(np.random.rand())
            )

    model = nn.Sequential(nn.Linear(4, 7), Noisy(), nn.Linear(7, 3))
    x = torch.randn(5, 4)
    for level in ("O2", "O3", "O5"):
        found = amp.compare_levels(model, lambda m: m(x).float().square().mean(), level)
        assert found.loss_error < 64 * found.roundoff
        assert all(o.error < 64 * found.roundoff for o in found.operations)


def test_masks_are_no_errors() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
            scores = x.unsqueeze(2) * x.unsqueeze(1)
            lowest = scores.masked_fill(mask, torch.finfo(x.dtype).min).softmax(-1)
            return (scores.masked_fill(mask, float("-inf")).softmax(-1) + lowest).sum(-1) * x

    model = nn.Sequential(nn.Linear(4, 8), Masked())
    x = torch.randn(5, 4)
    for level in ("O1", "O2", "O5"):
        found = amp.compare_levels(model, lambda m: m(x).float().square().mean(), level)
        assert worst(found).growth < 16


def test_what_is_written_in_place_is_compared_as_it_was() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2.0
            z = y.clone()
            y.mul_(3.0).add_(z)
            y[:, 0].zero_()
            out = torch.empty_like(y)
            torch.mul(y.detach(), 2.0, out=out)
            return y.relu_() + out

    model = nn.Sequential(nn.Linear(4, 8), InPlace(), nn.BatchNorm1d(8))
    x = torch.randn(16, 4)
    found = amp.compare_levels(model, lambda m: m(x).float().square().mean(), "O5")
    assert found.unmatched == 0
    assert {"mul", "mul_", "add_", "relu_"} <= {o.operation for o in found.operations}
    assert [o for o in found.operations if o.error_in > 0.05 or o.error > 0.05] == []


def test_calls_of_one_module_are_told_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x).tanh())

    x = torch.randn(6, 4)
    found = amp.compare_levels(Twice(), lambda m: (m(x).float() * x).mean(), "O2")
    assert sorted((o.call, o.nth) for o in found.operations if o.module == "inner") == [(1, 1), (2, 1)]
    assert {o.operation for o in found.operations if o.module is None} == {"mul", "mean"}
    assert "outside of the model" in str(found)


def test_checkpointed_modules_are_compared_once() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(None)
            self.block.linear, self.block.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.block, x, use_reentrant=False)
            assert isinstance(y, Tensor)
            return y

    x = torch.randn(6, 4)
    found = amp.compare_levels(Checkpointed(), lambda m: m(x).float().square().mean(), "O2")
    assert len([o for o in found.operations if o.module == "block.linear"]) == 1
    assert found.gradient_error < 0.05


def test_modules_that_run_other_kernels_in_half_are_judged_by_what_they_gave() -> None:
    class Other(nn.Module):
        """Like an LSTM on a CPU: one operation in FP32, others in half."""

        def forward(self, x: Tensor) -> Tensor:
            return x.exp() if x.dtype is torch.float32 else ((x.cosh() + x.sinh()) + 1000.0).sub(1000.0)

    model = nn.Sequential(nn.Linear(4, 8), Other(), nn.Linear(8, 2))
    x = torch.randn(6, 4)
    found = amp.compare_levels(model, lambda m: m(x).float().square().mean(), "O5")
    assert found.unmatched == 5
    assert "Of 5 operations nothing is known" in str(found)
    assert [(m.module, m.unmatched, m.operations) for m in found.modules[:1]] == [("1", 5, 5)]
    assert found.modules[0].growth > 16
    assert found.modules[0].error is not None
    assert found.modules[0].error > 0.05


def test_a_step_may_take_gradients_of_its_own() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(6, 4)

    def step(given: nn.Module) -> Tensor:
        inputs = x.clone().requires_grad_()
        hidden = checkpoint(given[0:2], inputs, use_reentrant=False)  # type: ignore[index]
        assert isinstance(hidden, Tensor)
        (gradient,) = torch.autograd.grad(hidden.float().sum(), inputs, create_graph=True)
        return gradient.float().square().mean()

    assert amp.compare_levels(model, step, "O1").gradient_error < 0.05


# --- loss scales ----------------------------------------------------------------------------------


def test_a_dynamic_scale_that_overflows_is_lowered_until_it_does_not() -> None:
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    found = amp.compare_levels(model, lambda m: m(x).float().sum() * 100.0, "O2")
    assert found.is_finite
    assert math.log2(found.loss_scale).is_integer()
    assert 2.0 <= found.loss_scale < 2.0**16
    # twice of it overflows
    doubled = RunPolicy("O2", loss_scale=2 * found.loss_scale)
    assert amp.compare_levels(model, lambda m: m(x).float().sum() * 100.0, doubled).overflowed


def test_an_overflow_at_every_scale_is_said() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x + (0.0 if x.dtype is torch.float16 else 1.0)).sqrt()  # whose derivative at 0 is infinite

    model, x = nn.Sequential(nn.Linear(4, 2), Root()), torch.randn(8, 4)
    found = amp.compare_levels(model, lambda m: m(x).float().sum(), "O2")
    assert found.overflowed
    assert not found.is_finite
    assert math.isinf(found.gradient_error)
    assert found.loss_scale == 65536.0
    assert "Gradients overflow at that loss scale" in str(found)


def test_a_reference_that_is_not_finite_is_said() -> None:
    model, x = nn.Linear(4, 2), torch.full((8, 4), float("nan"))
    found = amp.compare_levels(model, lambda m: m(x).float().sum(), "O2")
    assert not found.is_finite
    assert "At O0 the loss is not finite either" in str(found)


class Embedded(nn.Module):
    """Words, of which some occur twice, with sparse gradients or dense ones."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 2)
        with torch.no_grad():
            self.words.weight.uniform_(0.5, 1.0)
            self.last.weight.uniform_(0.5, 1.0)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.last(self.words(words))
        return found


@pytest.mark.parametrize("level", LEVELS)
def test_sparse_gradients_are_compared_as_dense_ones(level: str) -> None:
    words = torch.tensor([1, 2, 2, 5])
    sparse, dense = (
        amp.compare_levels(Embedded(is_sparse), lambda m: m(words).float().square().sum(), level)
        for is_sparse in (True, False)
    )
    assert "words.weight" in {p.parameter for p in sparse.parameters}
    assert {p.parameter: p.error for p in sparse.parameters} == pytest.approx(
        {p.parameter: p.error for p in dense.parameters}
    )
    assert sparse.gradient_error == pytest.approx(dense.gradient_error)
    assert sparse.is_finite
    assert amp.find_fp32_modules(Embedded(True), lambda m: m(words).float().square().sum(), level).modules == ()


def test_sparse_gradients_that_overflow_as_they_are_added_up_lower_the_scale() -> None:
    words = torch.full((64,), 3)

    def compared(is_sparse: bool) -> LevelComparison:
        model = Embedded(is_sparse)
        model.last.requires_grad_(False)
        policy = RunPolicy("O3", loss_scale="dynamic")
        return amp.compare_levels(model, lambda m: m(words).float().sum() / 8, policy)

    sparse, dense = compared(True), compared(False)
    assert sparse.is_finite
    assert sparse.loss_scale == dense.loss_scale < 2.0**16


# --- what stays -----------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Dropout, batch norm, buffers, gradients, and a mode that differs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(b0="cancelling")
        self.register_buffer("count", torch.zeros(()))
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.bad and self.model.first.weight.dtype is not torch.float32:
            raise ZeroDivisionError
        return self.model(x)


@pytest.fixture
def picture() -> Iterator[Callable[[nn.Module], list[Any]]]:
    def taken(model: nn.Module) -> list[Any]:
        tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()]
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
        numpy = np.random.get_state()
        return [[None if t is None else t.clone() for t in tensors], hooks, random.getstate(), str(numpy)]

    return taken


@pytest.mark.parametrize("what", ["clean", "raises", "own model", "eval"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_everything_is_as_before(level: str, what: str, picture: Callable[[nn.Module], list[Any]]) -> None:
    model, batch = Stateful(), Batch()
    model.bad = what == "raises"
    for p in list(model.parameters())[::2]:
        p.grad = torch.randn_like(p)
    model.model.norm.eval()
    if what == "eval":
        model.eval()
    before, ids = picture(model), [id(p.grad) for p in model.parameters()]

    def step(given: nn.Module) -> Tensor:
        random.random(), np.random.rand()
        if what == "own model":
            model.train()
            batch(model).backward()
        return batch(given)

    if what == "raises":
        model.bad = True
        if level == "O1":  # which leaves the weights
            model.bad = False
            with pytest.raises(ZeroDivisionError):
                amp.compare_levels(model, lambda m: step(m) / (1 // 0), level)
        else:
            with pytest.raises(ZeroDivisionError):
                amp.compare_levels(model, step, level)
    else:
        found = amp.compare_levels(model, step, level)
        assert found.gradient_error > 0.1
    after = picture(model)
    assert before[1:] == after[1:]
    assert [id(p.grad) for p in model.parameters()] == ids
    for one, other in zip(before[0], after[0], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_bitwise(one, other)
    assert amp.current_engine() is None


# --- what is refused ------------------------------------------------------------------------------


def test_arguments_that_are_none() -> None:
    model, batch = Model(), Batch()
    with pytest.raises(AmpTypeError, match="takes a torch.nn.Module, not a list"):
        amp.compare_levels([model], batch)  # type: ignore[arg-type]
    with pytest.raises(AmpTypeError, match="a function that gives the loss of one batch of a model, not a Tensor"):
        amp.compare_levels(model, batch(model))  # type: ignore[arg-type]
    with pytest.raises(AmpTypeError, match="step_fn has to return the loss, and gave a NoneType"):
        amp.compare_levels(model, lambda m: None)
    with pytest.raises(AmpTypeError, match="requires no gradient"):
        amp.compare_levels(model, lambda m: batch(m).detach())
    with pytest.raises(AmpStateError, match="Unexpected optimization level O9"):
        amp.compare_levels(model, batch, "O9")
    with pytest.raises(AmpStateError, match="has run a backward"):
        amp.compare_levels(model, lambda m: (batch(m).backward(), batch(m))[1])
    with pytest.raises(AmpStateError, match="does not depend on the model that compare_levels"):
        amp.compare_levels(model, lambda m: batch(model))
    with pytest.raises(AmpValueError, match="no module has that name"):
        amp.compare_levels(model, batch, RunPolicy("O2", ["nothing"]))


def test_another_batch_is_refused() -> None:
    model = nn.Linear(4, 2)
    batches = iter([torch.randn(3, 4) for _ in range(5)])
    with pytest.raises(AmpValueError, match="other inputs than the first time"):
        amp.compare_levels(model, lambda m: m(next(batches)).float().sum())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_that_was_initialized_is_refused(level: str) -> None:
    model = Model()
    with Engine() as engine:
        engine.initialize(model, opt_level=level, verbosity=0)
        with pytest.raises(AmpStateError, match=r"after amp.initialize.*before amp.initialize, or after amp.close"):
            amp.compare_levels(model, Batch(), level)
    amp.compare_levels(model, Batch(), level)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("result", model.weight * 2)
    with pytest.raises(AmpStateError, match="copy.deepcopy"):
        amp.compare_levels(model, lambda m: m(torch.randn(2, 4)).sum())


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("kind", ["Parameter 0.weight", "Buffer 1.running_mean"])
def test_lazy_modules_are_run_first(kind: str) -> None:
    lazy = nn.LazyLinear(4) if kind.startswith("P") else nn.Linear(2, 4)
    model = nn.Sequential(lazy, nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 1))
    x = torch.randn(3, 2)
    for call in (amp.compare_levels, amp.find_fp32_modules):
        with pytest.raises(AmpStateError, match=rf"{kind} of Sequential has no shape yet .*amp.{call.__name__}"):
            call(model, lambda m: m(x).float().sum())
    with torch.no_grad():
        model(x)
    assert math.isfinite(amp.compare_levels(model, lambda m: m(x).float().sum()).loss)


def test_shards_are_refused(one_process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 2)
    fully_shard(model)
    with pytest.raises(AmpStateError, match="before fully_shard"):
        amp.compare_levels(model, lambda m: m(torch.randn(2, 4)).sum())


# --- what goes ------------------------------------------------------------------------------------


class Spoiled(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ZeroDivisionError


ENDS = ["returns", "keeps the output", "raises", "gives a number", "raises in the backward", "runs the backward"]


@pytest.mark.parametrize("call", [amp.compare_levels, amp.find_fp32_modules])
@pytest.mark.parametrize("end", ENDS)
def test_no_copy_and_no_recording_stay_behind(
    end: str, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, calls = weakref.WeakSet[Any](), itertools.count()  # neither is put back
    recordings: list[weakref.ref[Any]] = []
    outputs: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    init = Follower.__init__

    def seen(self: Follower, model: nn.Module) -> None:
        recordings.append(weakref.ref(self))
        init(self, model)

    monkeypatch.setattr(Follower, "__init__", seen)

    def step(model: nn.Module) -> Any:
        copies.add(model if end == "keeps the output" else next(model.parameters()))
        next(calls)
        output = model(torch.ones(2, 4))
        if end == "keeps the output":
            outputs.put(output)
        if end == "raises":
            raise ZeroDivisionError
        loss = (Spoiled.apply(output) if end == "raises in the backward" else output).float().sum()
        if end == "runs the backward":
            loss.backward()
        return loss.item() if end == "gives a number" else loss

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if end in ("returns", "keeps the output"):
        call(model, step)
    else:
        raised: type[Exception] = ZeroDivisionError
        if not end.startswith("raises"):
            raised = AmpTypeError if end == "gives a number" else AmpStateError
        with pytest.raises(raised):
            call(model, step)
    gc.collect()
    assert next(calls) > 0
    assert len(copies) == 0
    assert recordings
    assert [one() for one in recordings] == [None] * len(recordings)


# --- how it looks, and what it goes by ------------------------------------------------------------


def test_it_is_a_table_in_notebooks_with_names_that_are_no_markup() -> None:
    model = nn.Sequential(OrderedDict({"<b>": nn.Linear(4, 2)}))
    found = amp.compare_levels(model, lambda m: m(torch.ones(2, 4)).sum(), "O5")
    html = found._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert html.count("<table>") == 2
    with pytest.raises(AttributeError):
        found.loss = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 0.0], 1.0),
        ([math.inf, 4.0], [3.0, 4.0], math.inf),
        ([math.nan, 4.0], [3.0, 4.0], math.inf),
        ([math.nan, 4.0], [math.nan, 4.0], 0.0),
        ([-math.inf, 5.0], [-math.inf, 4.0], 0.25),
        ([3.0, 4.0], [math.inf, 4.0], math.inf),
    ],
)
def test_relative_errors(a: list[float], b: list[float], expected: float) -> None:
    assert distance(torch.tensor(a), torch.tensor(b)).relative == pytest.approx(expected)
    assert distance(torch.tensor(a).half() * 4, torch.tensor(b), 0.25).relative == pytest.approx(expected)


def test_growth_is_infinite_where_something_first_is_not_finite() -> None:
    assert growth(0.5, 0.0, 2.0**-11) == 0.5 * 2**11
    assert growth(0.5, 0.25, 2.0**-11) == 2.0
    assert growth(math.inf, 0.25, 2.0**-11) == math.inf
    assert growth(math.inf, math.inf, 2.0**-11) == 1.0
