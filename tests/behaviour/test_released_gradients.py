"""`release_gradients=True`: each parameter is stepped in the backward, and its gradient freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from amp_engine import AmpRuntimeWarning, AmpStateError, AmpTypeError, AmpValueError, Engine, amp, kernels
from amp_engine.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad
from amp_engine.stepping.exact import exact_of
from tests import support
from tests.behaviour.test_resume import checkpoint as saved_run
from tests.behaviour.test_resume import resumed
from tests.models import CNN, LSTM, MLP, NORMED_MLP
from tests.ranks import on_ranks
from tests.support import assert_bitwise, frozen, momentum_sgd, optimizer_values, train

pytestmark = pytest.mark.skipif(not kernels.has_native(torch.device("cpu")), reason="only compiled kernels step so")


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": adamw,
    "SGD": momentum_sgd,
    "SGD, no momentum": lambda params: torch.optim.SGD(params, lr=0.1),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2, eps=1e-4),
    "FusedAdagrad": lambda params: FusedAdagrad(params, lr=1e-2),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=1e-2),
}
FORMS = {
    "FP32": {},
    "split": {"master_weights": "split"},
    "seven bytes": {"master_weights": "24bit", "moment_dtype": "8bit"},
}


def started(make: Any = adamw, task: Any = MLP, level: str = "O5", **keywords: Any) -> tuple[nn.Module, Optimizer]:
    return support.started(level, make, task, **{"release_gradients": True, **keywords})


def iterate(task: Any, model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> None:
    """A plain PyTorch loop, without scale_loss."""
    for index in range(first, first + steps):
        task.loss(model, task.batch(index)).backward()
        optimizer.step()
        optimizer.zero_grad()


def ended(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What a run ended with, as copies."""
    return {"model": support.frozen(dict(model.state_dict())), "optimizer": optimizer_values(optimizer)}


def both(make: Any, task: Any, steps: int = 4, **keywords: Any) -> list[Any]:
    """Everything after a run with and one without release."""
    ends = []
    for releases in (True, False):
        model, optimizer = started(make, task, release_gradients=releases, **keywords)
        iterate(task, model, optimizer, steps)
        ends.append(ended(model, optimizer))
        amp.close()
    return ends


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_is_that_of_gradients_that_stay(name: str, form: str) -> None:
    if form == "seven bytes" and name not in ("AdamW", "SGD", "FusedAdam"):
        form = "split"
    released, kept = both(OPTIMIZERS[name], NORMED_MLP, **FORMS[form])
    assert_bitwise(released, kept)


@pytest.mark.parametrize("task", [CNN, LSTM], ids=lambda task: task.name)
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O4", "O5"])
def test_every_level_at_a_scale_of_1(level: str, task: Any) -> None:
    make = OPTIMIZERS["FusedAdam"]
    released, kept = both(make, task, level=level, loss_scale=1.0)
    assert_bitwise(released, kept)


def test_one_gradient_is_alive_at_a_time() -> None:
    model, optimizer = started(task=NORMED_MLP)
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def count(param: Tensor) -> None:  # runs before the hook of initialize
        nonlocal most
        alive.append(weakref.ref(param.grad))
        most = max(most, sum(one() is not None for one in alive))

    amp.close()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, release_gradients=True)
    NORMED_MLP.loss(model, NORMED_MLP.batch(0)).backward()
    assert all(p.grad is None for p in model.parameters())
    assert len(alive) == len(list(model.parameters())) > 4
    assert most <= 2


def test_scale_loss_schedulers_and_groups_work() -> None:
    ends = []
    for releases in (True, False):
        model = MLP.model()
        first, *others = model.parameters()
        optimizer = torch.optim.AdamW([{"params": [first], "lr": 1e-3}, {"params": others, "weight_decay": 0.1}])
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, release_gradients=releases)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for _ in range(2):
            train(MLP, model, optimizer, "cc")
            scheduler.step()
            scheduler.step()
        ends.append(ended(model, optimizer))
        amp.close()
    assert_bitwise(*ends)


def test_a_closure_an_activation_checkpoint_and_a_shared_weight_work() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.inner = nn.Linear(8, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            return self.head(h + checkpoint(self.inner, h, use_reentrant=False))

    ends = []
    for releases in (True, False):
        torch.manual_seed(0)
        model = Tied()
        optimizer = adamw(model.parameters())
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, release_gradients=releases)
        for index in range(4):
            tokens = torch.arange(12).roll(index)

            def closure(tokens: Tensor = tokens, model: nn.Module = model, made: Optimizer = optimizer) -> Tensor:
                made.zero_grad()
                loss = nn.functional.cross_entropy(model(tokens), tokens)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
        optimizer.zero_grad()
        ends.append(ended(model, optimizer))
        amp.close()
    assert_bitwise(*ends)


def test_gradients_that_the_user_sets_are_stepped_by_the_step() -> None:
    ends = []
    for releases in (True, False):
        model, optimizer = started(release_gradients=releases)
        params = list(model.parameters())
        for index in range(3):
            grads = torch.autograd.grad(MLP.loss(model, MLP.batch(index)), params)
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            optimizer.step()
            optimizer.zero_grad()
        ends.append(ended(model, optimizer))
        amp.close()
    assert_bitwise(*ends)


def test_parameters_that_join_and_leave() -> None:
    ends = []
    for releases in (True, False):
        model = MLP.model()
        *first, last = model.parameters()
        optimizer = adamw(first)
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, release_gradients=releases)
        iterate(MLP, model, optimizer, 2)
        last.grad = None
        optimizer.add_param_group({"params": [last]})
        iterate(MLP, model, optimizer, 2, first=2)
        ends.append(ended(model, optimizer))
        if releases:
            optimizer.param_groups.pop()
            optimizer.step()
            MLP.loss(model, MLP.batch(9)).backward()
            assert [p.grad is None for p in model.parameters()] == [True] * len(first) + [False]
        amp.close()
    assert_bitwise(*ends)


def test_an_optimizer_that_is_made_later() -> None:
    ends = []
    for releases in (True, False):
        model = MLP.model().to(torch.bfloat16)
        amp.initialize(model, opt_level="O5", verbosity=0, release_gradients=releases)
        optimizer = adamw(model.parameters())
        iterate(MLP, model, optimizer, 3)
        ends.append(ended(model, optimizer))
        if releases:
            MLP.loss(model, MLP.batch(9)).backward()
            assert all(p.grad is None for p in model.parameters())
        amp.close()
    assert_bitwise(*ends)


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_is_the_uncut_one(form: str) -> None:
    ends = []
    for is_cut in (False, True):
        model, optimizer = started(**FORMS[form])
        iterate(MLP, model, optimizer, 3)
        if is_cut:
            state = saved_run(model, optimizer)
            amp.close()
            model, optimizer = resumed(state, MLP, adamw, "O5", release_gradients=True, **FORMS[form])
        iterate(MLP, model, optimizer, 3, first=3)
        ends.append(ended(model, optimizer))
        amp.close()
    assert_bitwise(*ends)


def test_close_takes_the_hooks_away_and_the_optimizer_is_not_kept_alive() -> None:
    model, optimizer = started()
    iterate(MLP, model, optimizer, 1)
    amp.close()
    MLP.loss(model, MLP.batch(0)).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    model, optimizer = started()
    iterate(MLP, model, optimizer, 1)
    ref = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ref() is None
    MLP.loss(model, MLP.batch(0)).backward()
    assert all(p.grad is not None for p in model.parameters())


class Overflows(nn.Module):
    """Gives the first of two layers a gradient that is not finite, at the second backward."""

    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad = nn.Linear(4, 4), nn.Linear(4, 4)
        self.is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        bad = self.bad(x)
        return self.good(x) + (bad * float("inf") if self.is_bad else bad)


def run_overflow(**keywords: Any) -> tuple[list[bool], list[bool]]:
    """Which parameters of the good and the bad layer a step moved."""
    torch.manual_seed(0)
    model = Overflows()
    optimizer = adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", release_gradients=True, **keywords)
    for is_bad in (False, True):
        model.is_bad = is_bad
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    return moved[:2], moved[2:]


def test_a_gradient_that_is_not_finite_leaves_out_its_own_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    amp.replace_engine(Engine())
    assert run_overflow() == ([True, True], [False, False])
    said = [line for line in capsys.readouterr().out.splitlines() if "finite" in line]
    assert len(said) == 1
    assert "the gradient of bad.weight and of 1 more was not finite" in said[0]


def test_without_skips_such_a_gradient_is_stepped() -> None:
    assert run_overflow(skip_on_overflow=False, verbosity=0) == ([True, True], [True, True])


def test_a_second_backward_is_refused() -> None:
    model, optimizer = started()
    MLP.loss(model, MLP.batch(0)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(AmpStateError, match=r"second gradient before AdamW\.step\(\).*leave out release_gradients"):
        MLP.loss(model, MLP.batch(1)).backward()
    assert_bitwise([p.detach() for p in model.parameters()], before)
    optimizer.step()
    iterate(MLP, model, optimizer, 1)


@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_is_refused(call: str) -> None:
    model, optimizer = started()
    MLP.loss(model, MLP.batch(0)).backward()
    with pytest.raises(AmpStateError, match=rf"amp\.{call}\(\) finds no gradient to clip"):
        getattr(amp, call)(optimizer, 1.0)


@pytest.mark.parametrize(
    ("error", "words", "level", "make", "keywords"),
    [
        (AmpTypeError, r"release_gradients='yes', but it is True or False", "O5", adamw, {"release_gradients": "yes"}),
        (AmpValueError, r"loss_scale='dynamic'.*Choose opt_level='O5'", "O2", adamw, {}),
        (AmpValueError, r"loss_scale=128\.0", "O5", adamw, {"loss_scale": 128.0}),
        (AmpStateError, r"with RMSprop", "O5", torch.optim.RMSprop, {}),
        (AmpStateError, r"with FusedLAMB", "O5", FusedLAMB, {}),
        (AmpStateError, r"with Adam, ", "O5", lambda params: torch.optim.Adam(params, amsgrad=True), {}),
    ],
)
def test_refusals(error: type[Exception], words: str, level: str, make: Any, keywords: dict[str, Any]) -> None:
    model = MLP.model()
    optimizer = make(model.parameters())
    with support.left_alone(model, optimizer), pytest.raises(error, match=words):
        amp.initialize(model, optimizer, opt_level=level, **{"release_gradients": True, **keywords})


def _on_a_rank(rank: int) -> None:
    model = MLP.model()
    with pytest.raises(AmpStateError, match="with several ranks"):
        amp.initialize(model, adamw(model.parameters()), opt_level="O5", release_gradients=True)


def test_several_ranks_are_refused() -> None:
    on_ranks(_on_a_rank, 2)


def test_the_banner_says_it_and_an_audit_says_why_it_audits_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    amp.replace_engine(Engine())
    model, optimizer = started(verbosity=1)
    assert "AdamW steps 4 FP32 masters by the compiled kernels, in the backward" in capsys.readouterr().out
    with amp.audit_updates(optimizer) as audit:
        iterate(MLP, model, optimizer, 2)
    assert "Not audited: release_gradients=True steps each parameter" in str(audit)


def test_a_loaded_state_with_another_rate_is_heeded() -> None:
    model, optimizer = started()
    iterate(MLP, model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["weight_decay"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    iterate(MLP, model, optimizer, 1)
    assert_bitwise([p.detach() for p in model.parameters()], before)


def test_a_split_weight_that_is_written_in_place_drops_its_remainder_as_without_release() -> None:
    ends = []
    for releases in (True, False):
        model, optimizer = started(release_gradients=releases, master_weights="split")
        for index in range(3):
            iterate(MLP, model, optimizer, 1, first=index)
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)
        ends.append(ended(model, optimizer))
        amp.close()
    assert_bitwise(*ends)


def test_a_gradient_that_is_not_dense_is_refused_before_anything_is_stepped() -> None:
    model, optimizer = started()
    before = ended(model, optimizer)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    p.grad = p.grad.to_sparse()
    with pytest.raises(AmpStateError, match=r"of layout torch\.sparse_coo for a gradient"):
        optimizer.step()
    assert_bitwise(ended(model, optimizer), before)


def test_a_scaled_loss_is_refused() -> None:
    model, optimizer = started()
    other = MLP.model()
    amp.initialize(other, adamw(other.parameters()), opt_level="O2", verbosity=0)
    before = [p.detach().clone() for p in model.parameters()]
    with (
        pytest.raises(AmpStateError, match="but the loss is scaled"),
        amp.scale_loss(MLP.loss(model, MLP.batch(0)), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
    assert_bitwise([p.detach() for p in model.parameters()], before)


def test_optimizers_of_a_common_parameter_are_refused() -> None:
    model = MLP.model()
    optimizers = [adamw(model.parameters()), momentum_sgd([next(model.parameters())])]
    with support.left_alone(model, *optimizers), pytest.raises(AmpStateError, match="step a common parameter"):
        amp.initialize(model, optimizers, opt_level="O4", verbosity=0, release_gradients=True)


def test_a_replaced_optimizer_that_has_stepped_is_told() -> None:
    model = MLP.model().to(torch.bfloat16)
    amp.initialize(model, opt_level="O5", verbosity=0, release_gradients=True)
    first = adamw(model.parameters())
    iterate(MLP, model, first, 2)
    second = adamw(model.parameters())
    MLP.loss(model, MLP.batch(2)).backward()
    with pytest.warns(AmpRuntimeWarning, match="was stepped by the AdamW that this AdamW replaces"):
        second.step()
    iterate(MLP, model, second, 1)


@pytest.mark.parametrize("keywords", [{"release_gradients": True}, {"release_gradients": False, "masters_on": "cpu"}])
def test_close_lets_go_of_masters(keywords: dict[str, Any]) -> None:
    model, optimizer = started(OPTIMIZERS["FusedAdam"], **keywords)
    iterate(MLP, model, optimizer, 1)
    masters = [weakref.ref(one.stepped) for p in model.parameters() for one in exact_of(p)]
    assert len(masters) == 4
    amp.close()
    gc.collect()
    assert [ref() for ref in masters] == [None] * 4


def test_hooks_go_with_their_optimizer() -> None:
    model, optimizer = started()
    iterate(MLP, model, optimizer, 1)
    assert all(p._post_accumulate_grad_hooks for p in model.parameters())
    del optimizer
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def _wrapped(rank: int) -> None:
    model = MLP.model()
    optimizer = adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, release_gradients=True)
    replica = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(AmpStateError, match="but ranks reduce gradients"):
        MLP.criterion(replica(MLP.batch(0)[0]), MLP.batch(0)[1]).backward()


def test_a_wrapper_of_one_rank_is_refused() -> None:
    on_ranks(_wrapped, 1)


def test_a_gradient_that_is_set_after_the_backward_is_a_second_one() -> None:
    model, optimizer = started()
    MLP.loss(model, MLP.batch(0)).backward()
    first = next(model.parameters())
    before = ended(model, optimizer)
    first.grad = torch.ones_like(first)
    with pytest.raises(AmpStateError, match="second gradient"):
        optimizer.step()
    assert_bitwise(ended(model, optimizer), before)


def test_a_loss_that_is_not_finite_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    amp.replace_engine(Engine())
    model, optimizer = started(verbosity=1)
    (MLP.loss(model, MLP.batch(0)) * float("nan")).backward()
    optimizer.step()
    assert "and of 3 more was not finite: nothing was stepped." in capsys.readouterr().out


def test_half_weights_without_masters_need_a_fused_optimizer() -> None:
    model = MLP.model()
    with pytest.raises(AmpStateError, match="which has half weights without masters"):
        amp.initialize(
            model, adamw(model.parameters()), opt_level="O5", master_weights=False, release_gradients=True, verbosity=0
        )


@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_that_is_unfrozen_is_released_from_its_second_step_on(form: str) -> None:
    ends = []
    for releases in (True, False):
        model = MLP.model()
        first = next(model.parameters()).requires_grad_(False)
        optimizer = adamw(model.parameters())
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, release_gradients=releases, **FORMS[form])
        iterate(MLP, model, optimizer, 2)
        first.requires_grad_(True)
        iterate(MLP, model, optimizer, 1, first=2)
        MLP.loss(model, MLP.batch(3)).backward()
        assert not releases or first.grad is None
        optimizer.step()
        ends.append(dict(model.state_dict()))
        amp.close()
    torch.testing.assert_close(*ends)  # with a frozen one torch's own step is taken without release


@pytest.mark.parametrize("keywords", [{"release_gradients": True}, {"masters_on": "cpu"}], ids=str)
def test_a_setting_that_comes_later_and_kernels_do_not_compute_is_refused(keywords: dict[str, Any]) -> None:
    model = MLP.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **keywords)
    optimizer.param_groups[0]["amsgrad"] = True
    before = frozen(model.state_dict())

    def iterate() -> None:
        MLP.loss(model, MLP.batch(0)).backward()
        optimizer.step()

    with pytest.raises(AmpStateError, match=r"A group of AdamW has amsgrad=True.*Nothing was stepped"):
        iterate()
    assert_bitwise(frozen(model.state_dict()), before)
