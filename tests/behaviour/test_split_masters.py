"""Masters in two halves under optimizers that the kernels do not know: the class's own step sees them widened."""

from __future__ import annotations

from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import amp
from amp_engine.errors import AmpStateError
from amp_engine.stepping import beside
from amp_engine.stepping.beside import Remainder, Remainder24
from amp_engine.stepping.exact import exact_of
from tests.behaviour.test_foreign_optimizers import CountsInGroup
from tests.behaviour.test_resume import checkpoint, resumed
from tests.models import CNN, MLP, NORMED_MLP
from tests.support import assert_bitwise, everything, frozen, started, train

SPLIT = ["split", "24bit"]


class Signs(Optimizer):
    """Moves each element by `lr` against its gradient, and keeps no state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


def amsgrad(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, amsgrad=True)


def in_two_groups(params: Any) -> Optimizer:
    first, *others = params
    return torch.optim.NAdam([{"params": others, "lr": 1e-2}, {"params": [first], "lr": 1e-3}])


CLASSES: dict[str, Any] = {
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "AdamW with amsgrad": amsgrad,
    "NAdam in two groups": in_two_groups,
    "schedule-free": lambda params: schedulefree.AdamWScheduleFree(params, lr=1e-2),
    "one that counts in its groups": CountsInGroup,
}


def run_of(make: Any, masters: Any, task: Any = NORMED_MLP) -> tuple[Any, Any]:
    model, optimizer = started("O5", make, task, loss_scale="dynamic", master_weights=masters)
    if hasattr(optimizer, "train"):
        optimizer.train()
    losses = train(task, model, optimizer, "ccoccc")
    state = frozen([dict(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]])
    return losses, (frozen(model.state_dict()), state)


@pytest.mark.parametrize("task", [NORMED_MLP, CNN], ids=lambda task: task.name)
@pytest.mark.parametrize("name", CLASSES)
def test_a_run_of_any_class_is_that_of_fp32_masters(name: str, task: Any) -> None:
    losses, truth = run_of(CLASSES[name], True, task)
    amp.close()
    split_losses, split = run_of(CLASSES[name], "split", task)
    assert split_losses == losses
    # About one value in 131,072 is moved by one unit in the last place.
    torch.testing.assert_close(split, truth, rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", CLASSES)
def test_masters_of_24_bits_stay_within_their_rounding_of_fp32_masters(name: str) -> None:
    losses, (weights, _) = run_of(CLASSES[name], True)
    amp.close()
    rounded_losses, (rounded, _) = run_of(CLASSES[name], "24bit")
    assert rounded_losses == pytest.approx(losses, rel=1e-3)
    torch.testing.assert_close(rounded, weights, rtol=1e-3, atol=1e-4)
    assert any(not torch.equal(rounded[name], weights[name]) for name in weights)


def test_updates_that_24_bits_cannot_hold_are_kept_on_average() -> None:
    model = nn.Linear(4096, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = Signs(model.parameters(), lr=2.0**-20)  # a 32nd of the unit of 24 bits below 1
    amp.initialize(model, optimizer, opt_level="O5", master_weights="24bit", verbosity=0)
    for _ in range(64):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    moved = 1.0 - model.state_dict()["weight"]
    assert moved.mean().item() == pytest.approx(64 * 2.0**-20, rel=0.05)
    assert moved.unique().numel() > 2


@pytest.mark.parametrize("masters", SPLIT)
@pytest.mark.parametrize("name", ["RMSprop", "AdamW with amsgrad", "NAdam in two groups"])
def test_a_resumed_run_is_the_uncut_one(name: str, masters: str) -> None:
    make, keywords = CLASSES[name], {"loss_scale": "dynamic", "master_weights": masters}
    model, optimizer = started("O5", make, **keywords)
    train(NORMED_MLP, model, optimizer, "ccoc")
    file = checkpoint(model, optimizer)
    losses = train(NORMED_MLP, model, optimizer, "cocc", first=4)
    truth = everything(model, optimizer)
    amp.close()
    model, optimizer = resumed(file, NORMED_MLP, make, "O5", **keywords)
    assert train(NORMED_MLP, model, optimizer, "cocc", first=4) == losses
    assert_bitwise(everything(model, optimizer), truth)


@pytest.mark.parametrize("masters", SPLIT)
def test_between_steps_there_is_nothing_in_float32_but_the_state(masters: str) -> None:
    model, optimizer = started("O5", torch.optim.RMSprop, master_weights=masters)
    train(NORMED_MLP, model, optimizer, "cc")
    remainders = [one for p in model.parameters() for one in exact_of(p) if isinstance(one, Remainder)]
    assert len(remainders) > 2
    for one in remainders:
        assert one.weight is not None
        assert (one.weight.numel(), one.weight.grad) == (0, None)
        assert one.param.grad is not None
        assert one.param.grad.dtype is torch.bfloat16
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, model.parameters()))


class Raises(torch.optim.RMSprop):
    fails = True

    def step(self, closure: Any = None) -> None:
        super().step()
        if self.fails:
            raise RuntimeError("in the middle of a step")


@pytest.mark.parametrize("masters", SPLIT)
def test_a_step_that_raises_leaves_the_model_half_and_the_next_one_goes_on(masters: str) -> None:
    model, optimizer = started("O5", Raises, master_weights=masters)
    with pytest.raises(RuntimeError, match="in the middle"):
        train(NORMED_MLP, model, optimizer, "c")
    optimizer.fails = False
    train(NORMED_MLP, model, optimizer, "c", first=1)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, model.parameters()))
    assert torch.bfloat16 in {p.dtype for p in model.parameters()}
    assert set(map(id, optimizer.state)) <= set(map(id, model.parameters()))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
def test_a_step_among_shown_masters_is_taken(make: Any) -> None:
    ends = []
    for masters in (True, "split"):
        model, optimizer = started("O5", make, master_weights=masters)
        with amp.on_masters(optimizer):
            train(NORMED_MLP, model, optimizer, "c")
        ends.append(frozen(model.state_dict()))
        amp.close()
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-7, atol=0)


@pytest.mark.parametrize("masters", [True, "split"])
def test_a_parameter_that_is_frozen_before_the_step_is_stepped_in_float32(masters: Any) -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5)
    amp.initialize(model, optimizer, opt_level="O5", master_weights=masters, verbosity=0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model.weight.requires_grad_(False)
    for _ in range(5):
        optimizer.step()
    moved = 1.0 - model.state_dict()["weight"]
    assert moved.mean().item() == pytest.approx(3.6e-4, rel=0.05)


@pytest.mark.parametrize("masters", [True, "split"])
def test_a_step_that_is_interrupted_is_saved_whole(masters: Any) -> None:
    model, optimizer = started("O5", Raises, master_weights=masters)
    before = frozen(model.state_dict())
    with pytest.raises(RuntimeError, match="in the middle"):
        train(NORMED_MLP, model, optimizer, "c")
    saved = frozen(model.state_dict())
    assert any(not torch.equal(saved[name], before[name]) for name in saved)
    assert all(state["step"] == 1 for state in optimizer.state_dict()["state"].values())
    torch.testing.assert_close(frozen(model.state_dict()), saved, rtol=2e-7, atol=0)
    model.load_state_dict(before)
    assert_bitwise(frozen(model.state_dict()), before)


@pytest.mark.parametrize("kind", ["expanded", "of inference mode", "made dense by the step"])
def test_gradients_that_cannot_be_written_are_stepped(kind: str) -> None:
    class MakesDense(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in (p for group in self.param_groups for p in group["params"]):
                p.grad = p.grad.to_dense()
            super().step()

    model = nn.Linear(4, 2, bias=False)
    optimizer = MakesDense(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O5", master_weights="split", verbosity=0)
    before = model.state_dict()["weight"].clone()
    ones = torch.ones(2, 4, dtype=torch.bfloat16)
    if kind == "of inference mode":
        with torch.inference_mode():
            ones = torch.ones(2, 4, dtype=torch.bfloat16)
    made = {"expanded": ones[:1, :1].expand(2, 4), "made dense by the step": ones.to_sparse()}
    model.weight.grad = made.get(kind, ones)
    optimizer.step()
    assert_bitwise(model.state_dict()["weight"], before - 1)


def test_attributes_that_a_step_sets_on_a_parameter_stay() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in (p for group in self.param_groups for p in group["params"]):
                p.seen += 1
                self.seen = p.seen
            super().step()

    model = NORMED_MLP.model()
    for p in model.parameters():
        p.seen = 0
    optimizer = Counts(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", master_weights="split", verbosity=0)
    train(NORMED_MLP, model, optimizer, "ccc")
    assert optimizer.seen == 3


@pytest.mark.parametrize("masters", SPLIT)
def test_a_tensor_is_rounded_by_blocks_as_at_once(masters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for block in (7, 1 << 22):
        monkeypatch.setattr(beside, "_BLOCK", block)
        model, optimizer = started("O5", torch.optim.RMSprop, CNN, master_weights=masters)
        model.to(memory_format=torch.channels_last)
        train(CNN, model, optimizer, "ccc")
        ends.append(frozen(model.state_dict()))
        amp.close()
    assert_bitwise(ends[0], ends[1])


@pytest.mark.parametrize("name", ["widen", "narrow", "_rounded"])
def test_an_error_among_many_masters_loses_no_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for fails in (False, True):
        model, optimizer = started("O5", torch.optim.RMSprop, MLP, master_weights="24bit")
        calls, real = [], getattr(Remainder24, name)

        def failing(self: Remainder, *args: Any, calls: Any = calls, real: Any = real) -> Any:
            calls.append(self)
            if len(calls) == 2:
                raise MemoryError
            return real(self, *args)

        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(Remainder24, name, failing)
                with pytest.raises(MemoryError):
                    train(MLP, model, optimizer, "c")
            assert name != "widen" or not any(one.is_wide for one in calls)
        if not fails or name == "widen":
            train(MLP, model, optimizer, "c")
        optimizer.state_dict()
        ends.append(frozen([model.state_dict(), [p.grad for p in model.parameters()]]))
        assert optimizer.param_groups[0]["amp_roundings"] == 1 + (name != "widen") * fails
        amp.close()
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:RMSprop steps parameters in float16")
def test_memory_that_became_another_is_refused_before_anything_is_written() -> None:
    for change in (lambda p: torch.zeros(4, 8, dtype=p.dtype)[:, :4], Tensor.half, Tensor.float):
        model = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.RMSprop(model.parameters())
        amp.initialize(model, optimizer, opt_level="O5", master_weights="split", verbosity=0)
        model.weight.data = change(model.weight.data)
        model.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
        before = frozen(model.weight)
        with pytest.raises(AmpStateError, match="has no split master|split master lies beside bfloat16"):
            optimizer.step()
        assert_bitwise(frozen(model.weight), before)
        assert not optimizer.state
        amp.close()


def test_a_gradient_that_a_step_makes_has_the_type_that_the_user_chose() -> None:
    class Makes(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in (p for group in self.param_groups for p in group["params"]):
                p.grad = torch.ones_like(p)
            super().step()

    model = nn.Linear(4, 4, bias=False)
    model.bfloat16().weight.grad_dtype = torch.float32
    optimizer = Makes(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O5", master_weights="split", verbosity=0)
    optimizer.step()
    assert_bitwise(model.weight.grad, torch.ones(4, 4))


def test_an_empty_parameter_keeps_its_shape() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2))])
    optimizer = torch.optim.RMSprop(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", master_weights="split", verbosity=0)
    for p in model:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [tuple(value.shape) for value in model.state_dict().values()] == [(0, 3), (2,)]


@pytest.mark.parametrize("masters", SPLIT)
def test_sparse_gradients_are_stepped_by_the_class(masters: str) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(16, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-5)
    amp.initialize(model, optimizer, opt_level="O5", master_weights=masters, verbosity=0)
    before = model.state_dict()["weight"].clone()
    model(torch.tensor([1, 2, 2])).float().sum().backward()
    optimizer.step()
    moved = (model.state_dict()["weight"] - before).ne(0).any(1)
    assert moved.nonzero().flatten().tolist() == [1, 2]
    assert model.weight.grad is not None
    assert model.weight.grad.is_sparse


@pytest.mark.parametrize("masters", SPLIT)
def test_a_closure_is_run(masters: str) -> None:
    model, optimizer = started("O5", torch.optim.RMSprop, master_weights=masters)
    before = frozen(model.state_dict())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = NORMED_MLP.loss(model, NORMED_MLP.batch(0))
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_close_leaves_no_count_of_roundings() -> None:
    model, optimizer = started("O5", torch.optim.RMSprop, master_weights="24bit")
    train(NORMED_MLP, model, optimizer, "cc")
    assert optimizer.param_groups[0]["amp_roundings"] == 2
    assert optimizer.state_dict()["param_groups"][0]["amp_roundings"] == 2
    amp.close()
    assert "amp_roundings" not in optimizer.param_groups[0]


def test_narrow_moments_are_refused_with_another_class() -> None:
    model = NORMED_MLP.model()
    optimizer = torch.optim.RMSprop(model.parameters())
    with pytest.raises(AmpStateError, match='moment_dtype="8bit" was given with a RMSprop, but .*"24bit" take every'):
        amp.initialize(model, optimizer, opt_level="O5", moment_dtype="8bit", verbosity=0)
    assert not hasattr(optimizer, "_amp_stash")
