"""`amp.audit_updates`: its figures are those of a plain computation, and nothing of the run is changed."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_engine import Engine, amp
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.optimizers import FusedAdam
from amp_engine.tools.telemetry.update_audit import UpdateAudit, spacing
from amp_engine.tools.telemetry.update_report import AuditedTensor, UpdateReport
from tests.models import NORMED_MLP
from tests.support import LEVELS, assert_bitwise, backward, frozen, started, train

HALVES = [torch.bfloat16, torch.float16]
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


def parameter(values: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def step(optimizer: Optimizer, *grads: Tensor) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.to(p.dtype)
    optimizer.step()


def only(audit: UpdateAudit) -> AuditedTensor:
    (found,) = audit.measured().tensors
    return found


def by_name(report: UpdateReport) -> dict[str, AuditedTensor]:
    return {one.name: one for one in report.tensors}


def gpt_like() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))


def trained(model: nn.Module, optimizer: Optimizer, steps: int = 5) -> None:
    dtype = next(model.parameters()).dtype
    for i in range(steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).to(dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


# The figures.


def test_one_step_by_hand() -> None:
    # bfloat16 has 8 bits: next to 1 is 1 + 2^-7, next to 256 is 258.
    weight = parameter([1.0, 1.0, 256.0, 0.0, 1.0])
    optimizer = SGD([weight], lr=1.0)
    with UpdateAudit(Engine(), optimizer) as audit:
        step(optimizer, torch.tensor([2.0**-10, 2.0**-7, 0.5, 2.0**-9, 0.0]))
    found = only(audit)
    lost, wanted = 2.0**-10 + 0.5, 2.0**-10 + 2.0**-7 + 0.5 + 2.0**-9
    assert found.erased == pytest.approx(lost / wanted, rel=1e-12)
    assert found.never_moved == 2 / 4, "the element without a gradient does not count"
    assert found.step_in_spacings == 0.25, "the lower one of the middle two of 1/8, 1/4, 1 and a large number"
    assert (found.dtype, found.parameter_dtype, found.shape, found.steps) == ("bfloat16", "bfloat16", (5,), 1)
    assert found.loses
    assert found.moved_by_chance == 0.0


def adamw_by_hand(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float) -> Tensor:
    w = w * (1 - lr * 0.01)
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    return w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("lr", [1e-2, 1e-4])
def test_adamw_over_steps_by_hand(dtype: torch.dtype, lr: float) -> None:
    torch.manual_seed(0)
    wider = WIDER[dtype]
    weight = nn.Parameter(torch.randn(40).to(dtype))
    optimizer = AdamW([weight], lr=lr, weight_decay=0.01)
    erased = wanted_sum = 0.0
    ratios, moved = [], torch.zeros(40, dtype=torch.bool)
    with UpdateAudit(Engine(), optimizer) as audit:
        for t in range(1, 5):
            grad = torch.randn(40).to(dtype)
            before = weight.detach().clone()
            state = optimizer.state.get(weight, {})
            m, v = (state[k].to(wider) if state else torch.zeros(40, dtype=wider) for k in ("exp_avg", "exp_avg_sq"))
            wanted = adamw_by_hand(before.to(wider), grad.to(wider), m, v, t, lr) - before.to(wider)
            step(optimizer, grad)
            got = weight.detach().to(wider) - before.to(wider)
            erased += float((wanted - got).abs().double().sum())
            wanted_sum += float(wanted.abs().double().sum())
            following = torch.tensor([after(x, dtype) for x in before.abs().tolist()], dtype=torch.float64)
            ratios.append(float((wanted.double().abs() / (following - before.double().abs())).median()))
            moved |= got != 0
    found = only(audit)
    assert found.erased == pytest.approx(erased / wanted_sum, rel=1e-3, abs=1e-9)
    assert found.never_moved == pytest.approx(float((~moved).double().mean()))
    assert found.step_in_spacings == pytest.approx(sorted(ratios)[1] / 2 + sorted(ratios)[2] / 2, rel=1e-3)


def after(x: float, dtype: torch.dtype) -> float:
    """The next larger number of a type, found by trial."""
    unit = torch.finfo(dtype).eps * 2.0 ** torch.frexp(torch.tensor(x, dtype=torch.float64))[1].item() / 2
    assert torch.tensor(x + unit, dtype=torch.float64).to(dtype).item() == x + unit
    assert torch.tensor(x + 0.49 * unit, dtype=torch.float64).to(dtype).item() == x
    return x + unit


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_spacing_is_the_way_to_the_next_number(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    values = torch.tensor([0.0, 1.0, -1.0, 1.5, 2.0, -3.0, info.tiny, least, -0.0], dtype=dtype)
    eps = info.eps
    expected = torch.tensor([least, eps, eps, eps, 2 * eps, 2 * eps, least, least, least], dtype=torch.float64)
    assert spacing(values).double().tolist() == expected.tolist()


def test_an_element_that_moved_once_has_moved() -> None:
    weight = parameter([1.0, 1.0])
    optimizer = SGD([weight], lr=1.0)
    with UpdateAudit(Engine(), optimizer) as audit:
        step(optimizer, torch.tensor([0.25, 2.0**-12]))
        step(optimizer, torch.tensor([2.0**-12, 2.0**-12]))
    assert only(audit).never_moved == 0.5
    assert only(audit).steps == 2


def test_float32_that_is_stepped_too_finely_is_told_to_learn_faster() -> None:
    weight = parameter([1.0, 2.0], torch.float32)
    optimizer = SGD([weight], lr=1e-9)
    with UpdateAudit(Engine(), optimizer) as audit:
        step(optimizer, torch.ones(2))
    found = only(audit)
    assert (found.erased, found.never_moved) == (1.0, 1.0)
    assert found.step_in_spacings == pytest.approx(1e-9 * 2**22, rel=1e-6)
    assert found.advice == "steps too small for float32: larger lr"


def test_float64_loses_nothing_that_could_be_seen() -> None:
    weight = parameter([1.0, 2.0], torch.float64)
    optimizer = SGD([weight], lr=2.0**-20)
    with UpdateAudit(Engine(), optimizer) as audit:
        step(optimizer, torch.ones(2))
    found = only(audit)
    assert (found.erased, found.never_moved, found.step_in_spacings) == (0.0, 0.0, 2.0**31)


# The verdict.


def test_pure_bfloat16_at_a_small_learning_rate_names_the_norm_first() -> None:
    model = gpt_like().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-4)
    with amp.audit_updates(optimizer, models=model) as audit:
        trained(model, optimizer)
    report = audit.measured()
    worst = report.tensors[0]
    assert (worst.name, worst.erased, worst.never_moved) == ("1.weight", 1.0, 1.0)
    losses = [max(one.erased, one.never_moved) for one in report.tensors]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1, "a bias that begins at 0 moves"
    assert not report.is_well
    assert worst.advice == "bfloat16 weights and state without masters: O5"
    assert 'opt_level="O5"' in str(audit)
    assert f"5 tensors: {worst.advice}." in str(audit)


def test_float16_is_told_to_take_o2() -> None:
    model = gpt_like().half()
    optimizer = SGD(model.parameters(), lr=1e-5)
    with amp.audit_updates(optimizer, models=model) as audit:
        trained(model, optimizer)
    assert audit.measured().tensors[0].advice == "float16 weights without masters: O2"


def test_float32_is_well() -> None:
    model = gpt_like()
    optimizer = AdamW(model.parameters(), lr=1e-4)
    with amp.audit_updates(optimizer, models=model) as audit:
        trained(model, optimizer)
    report = audit.measured()
    assert report.is_well
    assert not any(one.advice for one in report.tensors)
    assert "All is well" in str(audit)
    assert "less than 0.1 % of any" in str(audit)
    assert all(0 < one.erased < 1e-3 and one.never_moved == 0 for one in report.tensors)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5", "split"])
def test_float32_weights_of_any_kind_are_well(level: str) -> None:
    keywords = {"opt_level": "O5", "master_weights": "split"} if level == "split" else {"opt_level": level}
    with Engine() as engine:
        model = gpt_like()
        optimizer = AdamW(model.parameters(), lr=1e-4)
        engine.initialize(model, optimizer, verbosity=0, **keywords)  # type: ignore[call-overload]
        with UpdateAudit(engine, optimizer) as audit:
            for _i in range(4):
                backward(model(torch.randn(8, 64)).float().square().mean(), optimizer, engine=engine)
                optimizer.step()
                optimizer.zero_grad()
        report = audit.measured()
        assert report.is_well
        assert set(by_name(report)) == {name for name, _ in model.named_parameters()}
        stored = {name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()}
        for one in report.tensors:
            assert (one.dtype, one.parameter_dtype, one.steps) == ("float32", stored[one.name], 4)
            assert 0 < one.erased < 1e-3
            assert one.never_moved == 0


class RoundsByChance(SGD):
    """Rounds up as often as the step is far from the lower number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                wanted = p.float() - group["lr"] * p.grad.float()
                if p.dtype is torch.bfloat16:
                    bits = wanted.view(torch.int32) + torch.randint(0, 2**16, p.shape, dtype=torch.int32)
                    wanted = (bits & -(2**16)).view(torch.float32)
                p.copy_(wanted)


def test_rounding_by_chance_is_no_loss() -> None:
    weight = nn.Parameter(1 + torch.rand(2000).bfloat16() / 2)
    optimizer = RoundsByChance([weight], lr=2.0**-10)
    with UpdateAudit(Engine(), optimizer) as audit:
        step(optimizer, torch.ones(2000))
    found = only(audit)
    assert found.erased > 0.5
    assert 0.1 < found.moved_by_chance < 0.15
    assert found.remedy == "nothing"
    assert audit.measured().is_well


# The summary and the line to type.


def test_the_summary_has_the_share_of_all_steps_that_was_erased() -> None:
    model = nn.Linear(1, 1, bias=True).bfloat16()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    optimizer = SGD(model.parameters(), lr=1.0)
    with UpdateAudit(Engine(), optimizer, models=model) as audit:
        step(optimizer, torch.full((1, 1), 2.0**-10), torch.full((1,), 2.0**-7))  # 1/8 and 1 of the spacing
        optimizer.param_groups[0]["lr"] = 0.0
        step(optimizer, torch.ones(1, 1), torch.ones(1))
    report = audit.measured()
    assert report.summary == ("Linear, SGD, lr 0 to 1: 11.1 % of what SGD wanted never reached the weights.",)
    assert str(audit).splitlines()[3] == report.summary[0]
    assert json.loads(audit.to_json())["summary"] == [*report.summary]


def test_weights_that_are_rounded_by_chance_have_no_share() -> None:
    weight = nn.Parameter(1 + torch.rand(2000).bfloat16() / 2)
    optimizer = RoundsByChance([weight], lr=2.0**-10)
    with UpdateAudit(Engine(), optimizer) as audit:
        step(optimizer, torch.ones(2000))
    assert audit.measured().summary == ("Parameters, RoundsByChance, lr 0.000977.",)


@pytest.mark.parametrize(
    ("dtype", "trainer", "line"),
    [
        (torch.bfloat16, None, 'Type model, optimizer = amp.initialize(model, optimizer, opt_level="O5").'),
        (
            torch.float16,
            None,
            'Type model, optimizer = amp.initialize(model, optimizer, opt_level="O2") and `with amp.scale_loss(loss, '
            "optimizer) as scaled_loss: scaled_loss.backward()`.",
        ),
        (torch.bfloat16, "accelerate", 'Type amp.initialize(model, opt_level="O5") before accelerator.prepare().'),
        (torch.bfloat16, "lightning", 'Type amp.initialize(model, opt_level="O5") before the Trainer is made.'),
        (
            torch.float16,
            "transformers",
            'Type amp.initialize(model, opt_level="O5") before the Trainer is made, which trains in bfloat16.',
        ),
    ],
)
def test_the_line_to_type_fits_the_loop(dtype: torch.dtype, trainer: str | None, line: str) -> None:
    # A Trainer of transformers steps by Accelerate.
    loops: dict[str, Any] = {"__name__": f"{trainer}.trainer"}
    exec("def run(step, *args): step(*args)", loops)
    inner: dict[str, Any] = {"__name__": "accelerate.optimizer"}
    exec("def run(step, *args): step(*args)", inner)
    weight = parameter([1.0], dtype)
    optimizer = SGD([weight], lr=2.0**-20)
    with UpdateAudit(Engine(), optimizer) as audit:
        if trainer is None:
            step(optimizer, torch.ones(1))
        else:
            loops["run"](inner["run"], step, optimizer, torch.ones(1))
    assert audit.measured().sentences[-1] == line


# What is counted.


def test_every_nth_step_of_several_optimizers() -> None:
    first, second = parameter([1.0]), parameter([1.0])
    optimizers = [SGD([first], lr=1.0), Adam([{"params": [second]}], lr=1e-6)]
    with UpdateAudit(Engine(), optimizers, every=3) as audit:
        for i in range(7):
            step(optimizers[0], torch.tensor([0.5]))
            if i < 2:
                step(optimizers[1], torch.tensor([0.5]))
    report = audit.measured()
    assert [(one.class_name, one.steps, one.audited) for one in report.optimizers] == [("SGD", 7, 3), ("Adam", 2, 1)]
    assert [(one.optimizer, one.steps, one.name) for one in report.tensors] == [
        (1, 1, "group 0, tensor 0"),
        (0, 3, "group 0, tensor 0"),
    ]
    about = report.optimizers[0]
    assert about.milliseconds is not None
    assert about.milliseconds > 0
    # Weight twice, value, gradient and no state; and two flags. The real ones are not counted.
    assert about.bytes == 4 + 4 + 2 + 2


def test_skipped_steps_are_counted_apart() -> None:
    with Engine() as engine:
        model, optimizer = started("O2", engine=engine)
        with UpdateAudit(engine, optimizer) as audit:
            train(NORMED_MLP, model, optimizer, "cococ", engine=engine)
    (about,) = audit.measured().optimizers
    assert (about.steps, about.audited, about.skipped) == (5, 3, 2)
    assert audit.measured().is_well


def test_steps_that_are_skipped_for_another_optimizer_are_counted_apart() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [SGD(layer.parameters(), lr=0.1) for layer in layers]
    with Engine() as engine:
        engine.initialize(layers, optimizers, opt_level="O2", loss_scale=amp.DynamicLossScale(2.0), verbosity=0)
        with UpdateAudit(engine, optimizers) as audit:
            x = torch.ones(1, 4)
            with engine.scale_loss(layers[0](x).sum() + layers[1](x * 1e30).sum(), optimizers) as loss:
                loss.backward()
            assert all(p.grad.isfinite().all() for p in engine.master_params(optimizers[0]))
            for one in optimizers:
                one.step()
    assert [one.skipped for one in audit.measured().optimizers] == [1, 1]
    assert audit.measured().tensors == ()
    assert "No step was audited" in str(audit)


def test_a_fused_step_that_a_grad_scaler_skips_is_counted_apart() -> None:
    weight = parameter([1.0, 2.0], torch.float32)
    optimizer = Adam([weight], lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with UpdateAudit(Engine(), optimizer) as audit:
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    (about,) = audit.measured().optimizers
    assert (about.steps, about.audited, about.skipped) == (3, 2, 1)
    assert only(audit).erased < 1e-3, "the gradients are unscaled in the step"


# Nothing is changed.


class Noisy(SGD):
    """Draws numbers, keeps a count, and calls its base."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.count = torch.zeros(1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p) * random.random())
        super().step()


class Outer(Optimizer):
    """Steps the optimizer inside of it, on which a scheduler has put a `step` of its own."""

    def __init__(self, params: Any) -> None:
        base = SGD(params, lr=0.1, momentum=0.9)
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups, self.state = base, base.param_groups, base.state
        torch.optim.lr_scheduler.StepLR(base, 1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda params: AdamW(params, lr=1e-3),
    "adamw fused": lambda params: AdamW(params, lr=1e-3, fused=True),
    "adam capturable lr": lambda params: Adam(params, lr=torch.tensor(1e-3), foreach=False),
    "rmsprop foreach": lambda params: torch.optim.RMSprop(params, lr=1e-3, foreach=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-3),
    "noisy": lambda params: Noisy(params, lr=0.1),
    "outer": Outer,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", MAKERS)
def test_a_plain_run_is_bitwise_as_without(name: str, dtype: torch.dtype) -> None:
    runs = []
    for watched in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        model = gpt_like().to(dtype)
        optimizer = MAKERS[name](model.parameters())
        audit = UpdateAudit(Engine(), optimizer, every=2)
        with audit if watched else contextlib.nullcontext():
            trained(model, optimizer)
        runs.append(frozen([list(model.parameters()), optimizer.state_dict(), getattr(optimizer, "count", 0)]))
        runs[-1] += [torch.randn(3), random.random()]
        if watched:
            (about,) = audit.measured().optimizers
            assert (about.audited, about.refused) == (3, "")
            assert not optimizer._optimizer_step_pre_hooks
            assert not optimizer._optimizer_step_post_hooks
    assert_bitwise(runs[0], runs[1])


@pytest.mark.parametrize("level", [*LEVELS, "split"])
def test_a_run_of_the_engine_is_bitwise_as_without(level: str) -> None:
    runs = []
    keywords = {"level": "O5", "master_weights": "split"} if level == "split" else {"level": level}
    for watched in (True, False):
        torch.manual_seed(0)
        with Engine() as engine:
            model, optimizer = started(engine=engine, **keywords)  # type: ignore[arg-type]
            audit = UpdateAudit(engine, optimizer)
            with audit if watched else contextlib.nullcontext():
                for i in range(5):
                    optimizer.zero_grad()
                    overflows = i == 2 and level in ("O1", "O2")
                    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(i)), optimizer, overflow=overflows, engine=engine)
                    engine.clip_grad_norm_(optimizer, 0.01)
                    if i == 3:  # a write between steps, which masters follow
                        with torch.no_grad():
                            for p in model.parameters():
                                p.clamp_(-0.1, 0.1)
                    optimizer.step()
            weights = frozen(list(engine.master_params(optimizer)))
            runs.append([frozen(list(model.parameters())), weights, frozen(optimizer.state_dict()), torch.randn(2)])
            if watched and level not in ("O3",):
                assert audit.measured().is_well, str(audit)
    assert_bitwise(runs[0], runs[1])


# What cannot be audited.


def test_a_closure_is_named() -> None:
    weight = parameter([1.0], torch.float32)
    optimizer = torch.optim.LBFGS([weight])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    with UpdateAudit(Engine(), optimizer) as audit:
        optimizer.step(closure)
    (about,) = audit.measured().optimizers
    assert about.refused.startswith("Not audited: step(closure)")
    assert about.class_name == "LBFGS"
    assert weight.item() != 1.0
    assert about.refused in " ".join(str(audit).split())


def test_a_closure_that_the_class_calls_first_is_called_once_before_the_audit() -> None:
    runs = []
    for watched in (True, False):
        weight, losses = parameter([1.0, 2.0]), list[float]()
        optimizer = AdamW([weight], lr=1e-4)

        def closure() -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = (weight**2).sum()  # noqa: B023
            loss.backward()
            losses.append(loss.item())  # noqa: B023
            return loss

        with UpdateAudit(Engine(), optimizer) if watched else contextlib.nullcontext() as audit:
            results = [optimizer.step(closure), optimizer.step(closure=closure)]
        if audit is not None:
            (about,) = audit.measured().optimizers
            assert (about.audited, about.refused) == (2, "")
            assert only(audit).erased > 0.5
        runs.append(frozen([weight, optimizer.state_dict(), losses, [one.item() for one in results]]))
    assert_bitwise(runs[0], runs[1])


class HalfOnly(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(p.dtype is not torch.bfloat16 for group in self.param_groups for p in group["params"]):
            raise RuntimeError("bfloat16 alone")
        super().step()


def test_a_class_that_raises_on_wider_copies_is_named_and_goes_on() -> None:
    weight = parameter([1.0])
    optimizer = HalfOnly([weight], lr=1.0)
    with UpdateAudit(Engine(), optimizer) as audit:
        step(optimizer, torch.tensor([0.5]))
        step(optimizer, torch.tensor([0.25]))
    (about,) = audit.measured().optimizers
    assert weight.item() == 0.25
    assert "bfloat16 alone" in about.refused
    assert (about.steps, about.audited, about.skipped) == (2, 0, 0)


def test_a_class_without_float64_is_audited_with_a_note() -> None:
    model = gpt_like()
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level="O2", verbosity=0)
        with UpdateAudit(engine, optimizer) as audit:
            for _ in range(3):
                backward(model(torch.randn(4, 64)).float().square().mean(), optimizer, engine=engine)
                optimizer.step()
    report = audit.measured()
    assert report.is_well
    assert report.optimizers[0].audited == 3
    assert report.optimizers[0].note in " ".join(str(audit).split())
    assert "no float64" in report.optimizers[0].note
    assert all(one.step_in_spacings > 100 for one in report.tensors)


def test_complex_weights_are_named() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = SGD([weight], lr=1.0)
    with UpdateAudit(Engine(), optimizer) as audit:
        step(optimizer, torch.ones(2))
    assert "complex64" in audit.measured().optimizers[0].refused


def test_wrong_arguments() -> None:
    optimizer = SGD([parameter([1.0])], lr=1.0)
    with pytest.raises(AmpTypeError, match="every is a number of steps, not a float"):
        amp.audit_updates(optimizer, every=1.5)  # type: ignore[arg-type]
    with pytest.raises(AmpValueError, match="every=0"):
        amp.audit_updates(optimizer, every=0)
    with pytest.raises(AmpTypeError, match="which a Linear has not"):
        amp.audit_updates(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(AmpTypeError, match="models is a model or a list of them, not a str"):
        amp.audit_updates(optimizer, models="model")  # type: ignore[arg-type]
    with amp.audit_updates(optimizer) as audit, pytest.raises(AmpStateError, match="inside of its `with` already"):
        audit.__enter__()
    assert not optimizer._optimizer_step_pre_hooks


def test_json_and_files(tmp_path: Any) -> None:
    model = gpt_like().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-4)
    with amp.audit_updates(optimizer, models=model) as audit:
        trained(model, optimizer, 1)
    fields = json.loads(audit.to_json())
    assert (fields["format"], fields["every"]) == (1, 1)
    assert fields["tensors"][0]["name"] == "1.weight"
    assert fields["tensors"][0]["advice"].endswith("O5")
    assert fields["optimizers"][0]["class_name"] == "AdamW"
    assert "loses most" in fields["sentences"][0]
    for suffix in ("txt", "json", "html"):
        audit.save(tmp_path / f"audit.{suffix}")
        assert "1.<wbr>weight" in (text := (tmp_path / f"audit.{suffix}").read_text()) or "1.weight" in text
    with pytest.raises(AmpValueError, match=r"audit is written as .* Use for example '.*audit\.html'"):
        audit.save(tmp_path / "audit.pdf")
    assert not (tmp_path / "audit.pdf").exists()


def test_steps_that_float16_makes_not_finite_name_the_level() -> None:
    """AdamW's eps of 1e-8 is 0 in float16, and so are squares of small gradients: 0 / 0."""
    model = nn.Linear(8, 8).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with amp.audit_updates(optimizer, models=model) as audit:
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-5)
        optimizer.step()
    assert audit.measured().sentences == (
        "No step was audited.",
        "A step of AdamW in float16 gave weights that are not finite, and the same step in FP32 did not: "
        "numbers as small as an eps of 1e-8 are 0 in float16.",
        'Type model, optimizer = amp.initialize(model, optimizer, opt_level="O2") and `with amp.scale_loss(loss, '
        "optimizer) as scaled_loss: scaled_loss.backward()`.",
    )


def test_steps_that_are_far_too_long_are_not_taken_for_rounding_by_chance() -> None:
    class TooLong(torch.optim.SGD):
        """As AdamW in float16, whose second moment is 0."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad * (100.0 if p.dtype is torch.float16 else 1e-4))

    model = nn.Linear(8, 8).half()
    optimizer = TooLong(model.parameters(), lr=1.0)
    with amp.audit_updates(optimizer, models=model) as audit:
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        optimizer.step()
    report = audit.measured()
    assert {one.remedy for one in report.tensors} == {"O2"}
    assert "its steps differ from what TooLong wanted by" in report.summary[0]
