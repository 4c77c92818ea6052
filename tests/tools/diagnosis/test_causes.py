"""The named cause of a loss or a gradient that is not finite, and the causes that are said not to be known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_engine import Engine
from amp_engine.tools.diagnosis import evidence
from amp_engine.tools.diagnosis.find_overflow import OverflowSource
from amp_engine.tools.diagnosis.post_mortem import OverflowRecord, likely_cause


@pytest.fixture
def engine() -> Iterator[Engine]:
    torch.manual_seed(0)
    with Engine() as one:
        yield one


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))


def trained(
    engine: Engine, model: nn.Module, loss_fn: Callable[[int], Tensor], steps: int, level: str = "O2", **keywords: Any
) -> list[OverflowRecord]:
    """Return the records of overflows after so many steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine.initialize(model, optimizer, opt_level=level, **keywords)
    for step in range(steps):
        with engine.scale_loss(loss_fn(step), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(engine.overflow_report())


def found(engine: Engine, model: nn.Module, loss_fn: Callable[[], Tensor], scale: float = 8.0) -> OverflowSource:
    engine.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3), opt_level="O1", verbosity=0)
    return engine.find_overflow(loss_fn, loss_scale=scale)


def diagnosed(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Amp diagnosis")]
    return line


# ---- the graph


def test_a_second_loss_on_a_graph_has_the_cause_of_the_first(engine: Engine) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)
    for _ in range(2):
        grown = (model(torch.ones(3, 4)).float() + 100.0).exp()
        for loss_id, loss in enumerate([grown.mean(), (grown * 2.0).sum()]):
            with engine.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
                scaled_loss.backward(retain_graph=loss_id == 0)
        optimizer.step()
        optimizer.zero_grad()
    records = engine.overflow_report()[2:]
    why = "exp of numbers that are too large in 18 of 18 elements"
    assert [(one.cause, one.why, one.region) for one in records] == [("forward", why, None)] * 2


class Parts(nn.Module):
    """Two checkpointed parts, and an ordinary layer in between; the last part gives -inf."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.one, self.mid, self.two, self.out = (nn.Linear(4, 4) for _ in range(5))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda h: self.one(h).tanh(), self.first(x), use_reentrant=self.reentrant)
        x = checkpoint(lambda h: h + (self.two(h) * 0.0).log(), self.mid(x), use_reentrant=self.reentrant)
        return F.cross_entropy(self.out(x).float(), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_last_checkpointed_part_is_named_with_what_is_around_it(engine: Engine, reentrant: bool) -> None:
    model = Parts(reentrant)
    record = trained(engine, model, lambda _: model(torch.ones(3, 4)), 2, verbosity=0)[-1]
    assert record.region is not None
    assert [str(name).split(".")[0] for name in record.region] == ["mid", "out"]


def test_minus_inf_of_a_batch_is_data(engine: Engine) -> None:
    model = net()
    x = torch.ones(3, 4)
    x[1, 1] = -math.inf
    record = trained(engine, model, lambda _: (model[0](x).float() ** 2).log_softmax(1).mean(), 2, verbosity=0)[-1]
    assert (record.cause, record.operation) == ("data", "addmm")


def test_the_reason_is_said_of_an_operation_that_is_known_to_have_made_it(engine: Engine) -> None:
    model = net()

    def entropy(step: int) -> Tensor:
        p = (model(torch.ones(3, 4)).float() - 300.0 * torch.eye(6)[:3]).softmax(1)
        return (p * p.log()).sum()

    record = trained(engine, model, entropy, 2, verbosity=0)[-1]
    assert record.why == "log of 0 in 3 of 18 elements"


def test_minus_inf_of_a_mask_is_told_from_one_that_an_operation_made(engine: Engine) -> None:
    model = net()
    mask = torch.eye(6, dtype=torch.bool)[:3]

    def cross_entropy(step: int) -> Tensor:
        logits = model(torch.ones(3, 4)).float().masked_fill(mask, -math.inf)
        return -(torch.ones(3, 6).masked_fill(mask, 0.0) * logits.log_softmax(1)).sum()

    record = trained(engine, model, cross_entropy, 2, verbosity=0)[-1]
    assert record.why == "-inf of a mask in 3 of 18 elements of log_softmax"
    assert "fill in a finite number there" in str(record)


def test_the_buffer_that_holds_the_value_is_named_and_none_that_it_made_so(engine: Engine) -> None:
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
            self.register_buffer("inverse", 1.0 / torch.arange(6.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm((self.layer(x) * self.inverse[None]).float()).mean()

    model = Distances()
    record = trained(engine, model, lambda _: model(torch.ones(3, 4)), 2, verbosity=0)[-1]
    assert (record.cause, record.buffer) == ("data", "inverse")
    assert str(record).endswith(
        "was given a value that is not finite from outside of the graph: the buffer inverse holds it."
    )
    engine.close()
    model = Distances()
    model.inverse.fill_(1.0)
    record = trained(engine, model, lambda _: model(torch.full((3, 4), math.nan)), 2, verbosity=0)[-1]
    assert bool(model.norm.running_mean.isnan().all())
    assert (record.cause, record.buffer) == ("data", None)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mean", "mean of nothing"),
        ("targets", "nll_loss of targets that are all ignored"),
        ("count", "div by 0 in 1 of 3 elements"),
        ("variance", "native_batch_norm by a running_var below 0 in 2 of 6 elements"),
    ],
)
def test_a_division_by_a_count_or_a_variance_is_explained(engine: Engine, kind: str, why: str) -> None:
    model = net()

    def loss(step: int) -> Tensor:
        y = model(torch.ones(3, 4)).float()
        if kind == "mean":
            return y.sum() + y[:0].mean()
        if kind == "targets":
            return F.cross_entropy(y, torch.full((3,), -100))
        if kind == "count":
            return (y * torch.tensor([[1], [1], [0]]) / torch.tensor([[1], [1], [0]])).sum()
        variance = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
        return F.batch_norm(y, torch.zeros(6), variance, torch.ones(6, requires_grad=True)).sum()

    record = trained(engine, model, loss, 2, verbosity=0)[-1]
    assert (record.cause, record.why) == ("forward", why)


# ---- a finite loss


def test_a_derivative_that_the_backward_masks_is_no_cause(engine: Engine) -> None:
    model = net()

    def rates(step: int) -> Tensor:
        rate = model(torch.ones(3, 4)).float().relu()
        kept = torch.where(rate > 0, rate.log(), 0.0).sum()
        return kept + (rate * 1e30).sum() * 1e-30 * 1e36  # which overflows, at any scale

    records = trained(engine, model, rates, 3, verbosity=0)
    assert [(one.cause, one.why) for one in records] == [("backward", None)] * 3


def test_a_backward_of_the_users_own_is_not_run_once_more(engine: Engine) -> None:
    class Counted(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 0.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            Counted.calls += 1
            return grad

    model = net()
    records = trained(engine, model, lambda _: Counted.apply(model(torch.ones(3, 4)).float()).sqrt().mean(), 3)
    assert [one.why for one in records] == [None] + ["sqrt of 0 in 18 of 18 elements"] * 2
    assert Counted.calls == 3


@pytest.mark.parametrize(
    ("normalized", "why"),
    [
        (
            lambda y: F.normalize(y),
            "div by numbers down to 1e-12 enlarges gradients, beyond float16's range, in 6 of 18",
        ),
        (lambda y: y / y.norm(dim=1, keepdim=True).clamp_min(1e-9), "div by numbers down to 1e-09 enlarges gradients"),
        (lambda y: F.cosine_similarity(y, torch.ones(3, 6)), "div by numbers down to 1e-08 enlarges gradients"),
    ],
    ids=["normalize", "norm", "cosine_similarity"],
)
def test_a_row_of_zeros_that_is_normalized_is_named(
    engine: Engine, normalized: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 6, bias=False)
    x = torch.ones(3, 4)
    x[1] = 0.0
    records = trained(engine, model, lambda _: normalized(model(x)).sum(), 8, "O1")
    assert [one.why is None for one in records] == [True] + [False] * 7
    assert str(records[-1].why).startswith(why)
    advice = (
        "  Raise the eps there, as in F.normalize(x, eps=1e-3), or compute in FP32 what is divided (amp.keep_float)."
    )
    assert str(records[-1]).endswith(advice)
    assert diagnosed(capsys).endswith(advice)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_division_by_a_small_number_is_named_only_where_its_gradient_is_float16(engine: Engine, level: str) -> None:
    weight = nn.Parameter(torch.ones(4))
    model = nn.ParameterList([weight])
    records = trained(engine, model, lambda _: (weight * 1e-12 / 1e-9).sum() * 1e38, 3, level, loss_scale="dynamic")
    assert [one.why for one in records] == [None] * 3


@pytest.mark.parametrize("kind", ["data", "forward"])
def test_a_value_that_the_loss_hides_is_found_from_the_second_overflow_on(engine: Engine, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 6))
    x = torch.ones(3, 4)
    x[1, 1] = math.inf if kind == "data" else 1.0
    mask = torch.tensor([False, True, False])[:, None].expand(3, 6)

    def loss(step: int) -> Tensor:
        y = model(x).float()
        if kind == "forward":
            y = torch.where(mask, 1.0, y.masked_fill(mask, -math.inf).softmax(1) @ y.repeat(2, 1))
        return y.mean()

    first, second = trained(engine, model, loss, 2, verbosity=0)
    assert (first.cause, first.loss_is_finite, second.loss_is_finite) == ("backward", True, True)
    assert second.cause == kind
    assert "The loss does not show what is not finite in the forward, and gradients do." in str(second)
    assert ("softmax: nan in 1 of 3 rows" in str(second)) == (kind == "forward")


def test_a_finite_loss_is_searched_in_the_backward_after_an_overflow_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Tensor] = []
    monkeypatch.setattr(evidence, "undefined_derivative", lambda loss: searched.append(loss) or (None, None))
    model = net()
    trained(engine, model, lambda step: model(torch.ones(3, 4)).float().mean() * (1e30 if step == 1 else 1.0), 5)
    assert len(searched) == 1


# ---- the diagnosis


def test_nan_that_a_lower_scale_may_mend_is_not_called_undefined(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net()

    class Nan(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * math.nan

    trained(engine, model, lambda _: Nan.apply(model(torch.ones(3, 4))).float().mean(), 8)
    said = diagnosed(capsys)
    assert "It is NaN at each scale from 65536 to 512.  If it overflows, a lower scale helps, FP32 (amp.keep" in said
    assert "Why is not known" in said


def test_losses_of_other_optimizers_are_no_losses_before(engine: Engine) -> None:
    """A GAN's two losses may share a loss_id."""
    model, other = net(), net()
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (model, other)]
    engine.initialize([model, other], optimizers, opt_level="O2", verbosity=0)
    for _ in range(12):
        for one, optimizer, factor in ((model, optimizers[0], 1.0), (other, optimizers[1], 1e9)):
            with engine.scale_loss((one(torch.ones(3, 4)).float() + 1.0).mean() * factor, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    records = engine.overflow_report()
    assert len(records) >= 12
    assert not any("have grown" in str(record) for record in records)


def test_the_diagnosis_sees_that_the_loss_has_grown(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    trained(engine, model, lambda step: (model(torch.ones(3, 4)).float() + 1.0).mean() * (1e9 if step > 3 else 1.0), 12)
    said = diagnosed(capsys)
    assert "Losses have grown" in said
    assert "Lower the learning rate" in said
    assert "bfloat16" not in said


@pytest.mark.parametrize("forward", [2, 6])
def test_of_several_causes_one_that_no_scale_mends_is_diagnosed(
    engine: Engine, forward: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net()

    def loss(step: int) -> Tensor:
        y = model(torch.ones(3, 4)).float()
        return y.mean() * 1e9 if step % 7 == 0 or step > forward else (y * 0.0).log().mean()

    trained(engine, model, loss, 8)
    said = diagnosed(capsys)
    assert f"Causes differ: {8 - forward} backward, {forward} forward; the last forward:  Loss finite: no" in said
    assert "log of 0 in 18 of 18 elements" in said


def test_weights_that_no_checked_gradient_has_spoiled_point_behind_the_check(engine: Engine) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine.initialize(model, optimizer, opt_level="O5", skip_on_overflow=True, verbosity=0)
    for step in range(3):
        with engine.scale_loss(model(torch.ones(3, 4)).float().mean() * min(step, 1), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-3 if step else math.inf
        optimizer.step()
        optimizer.zero_grad()
    record = engine.overflow_report()[0]
    assert (record.cause, record.only_checked) == ("weights", True)
    assert "look at the learning rate" in str(record)


def test_weights_that_are_spoiled_after_a_skipped_step_point_behind_the_check(engine: Engine) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for step in range(3):
        with engine.scale_loss(model(torch.ones(3, 4)).float().mean() * (1e9 if step == 0 else 1), optimizer) as scaled:
            scaled.backward()
        optimizer.param_groups[0]["lr"] = math.inf if step == 1 else 1e-3
        optimizer.step()
        optimizer.zero_grad()
    first, last = engine.overflow_report()
    assert (first.skipped, first.cause, last.cause, last.only_checked) == (True, "backward", "weights", True)


def test_a_loss_that_is_not_finite_on_another_rank_is_a_cause_elsewhere() -> None:
    facts = {"has_gradient": True, "has_bad_weights": False, "traced_to": None}
    assert likely_cause(0.5, [], rank_losses=[0.5, math.nan], **facts) == "elsewhere"
    assert likely_cause(0.5, [], rank_losses=[0.5, None], **facts) == "backward"


# ---- find_overflow


@pytest.mark.parametrize("kind", ["relu", "padding"])
def test_nan_on_the_way_of_the_backward_that_reaches_no_parameter_is_no_overflow(engine: Engine, kind: str) -> None:
    layer, embedding = nn.Linear(4, 6), nn.Embedding(3, 4, padding_idx=0)

    def loss() -> Tensor:
        if kind == "relu":
            return layer(torch.ones(3, 4)).relu().float().sqrt().mean()
        return embedding(torch.arange(3)).pow(2).sum(1).sqrt().mean()

    result = found(engine, nn.ModuleList([layer, embedding]), loss)
    assert result.phase is None, str(result)


def test_an_inf_is_not_blamed_on_nan_that_the_backward_masks(engine: Engine) -> None:
    layer = nn.Linear(4, 6)

    def loss() -> Tensor:
        rate = layer(torch.ones(3, 4)).relu()
        return torch.where(rate > 0, rate.float().log() * 1e6, 0.0).sum()

    result = found(engine, layer, loss)
    assert (result.phase, result.operation, result.kind, result.dtype) == ("backward", "cast", "inf", torch.float16)


def test_a_penalty_of_gradients_is_followed_to_the_end(engine: Engine) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    with torch.no_grad():
        model[0].bias.fill_(-1.0)

    def loss() -> Tensor:
        x = torch.stack([torch.zeros(4), torch.ones(4) * 5.0, -torch.ones(4) * 5.0]).requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + grad.pow(2).sum(1).sqrt().mean()

    result = found(engine, model, loss)
    assert (result.phase, result.operation) == ("backward", "sqrt")


def test_a_value_of_a_constant_is_data_of_the_operation_that_takes_it(engine: Engine) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid())

    def loss() -> Tensor:
        x = torch.ones(3, 4)
        x[1, 1] = math.inf
        return model(x).float().mean()

    result = found(engine, model, loss)
    assert (result.phase, result.operation, result.module, result.kind) == ("data", None, "", "inf")
    layer = nn.Linear(6, 6)
    engine.close()
    both = nn.ModuleList([model, layer])
    result = found(engine, both, lambda: loss() + layer(torch.ones(3, 6)).float().sum(), 2.0**15)
    assert (result.phase, result.module_type) == ("data", "Sequential"), "though the scale is too high as well"
