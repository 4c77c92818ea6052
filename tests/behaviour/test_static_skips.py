"""Gradients that are not finite at a static scale: skipped in bfloat16, stepped on elsewhere as in apex."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import amp, kernels
from amp_engine.errors import AmpValueError
from amp_engine.kernels import tensor_lists
from tests.support import assert_bitwise

MESSAGE = "Gradient overflow.  Skipping step, loss scaler 0 is static at 1.0"
NAN = float("nan")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1),  # by its own step
}


def by_scale_loss(loss: Tensor, optimizers: Any) -> None:
    with amp.scale_loss(loss, optimizers) as scaled_loss:
        scaled_loss.backward()


def by_itself(loss: Tensor, optimizers: Any) -> None:
    loss.backward()


def by_delay(loss: Tensor, optimizers: Any) -> None:
    with amp.scale_loss(loss, optimizers, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()


def after_another(loss: Tensor, optimizers: Any) -> None:
    by_scale_loss(loss.detach().nan_to_num(0.0) * next(iter(optimizers[0].param_groups[0]["params"])).sum(), optimizers)
    loss.backward()


LOOPS = {"scale_loss": by_scale_loss, "plain": by_itself, "delayed": by_delay, "both": after_another}


def steps(
    level: str,
    values: list[float],
    optimizers: int = 1,
    run: Callable[[Tensor, Any], None] = by_scale_loss,
    make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["AdamW"],
    clip: Callable[[Any], object] = lambda optimizer: None,
    **keywords: Any,
) -> tuple[Any, list[bool]]:
    """Train on inputs of these values. Returns the model, and if each step left all weights as they were."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    made = [make(part.parameters()) for part in ([model] if optimizers == 1 else model)]
    model, made = amp.initialize(model, made, opt_level=level, verbosity=1, **keywords)
    stayed = []
    for value in values:
        before = copy.deepcopy(model.state_dict())
        run(model(torch.full((3, 4), value)).float().square().mean(), made)
        for one in made:
            clip(one)
        for one in made:
            one.step()
        for one in made:
            one.zero_grad()
        after = model.state_dict()
        stayed.append(all(torch.equal(after[name], value) for name, value in before.items()))
    return model, stayed


def is_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


SKIPPING = {"O4": {}, "O5": {}, "O5, split": {"master_weights": "split"}, "O5, pure": {"master_weights": False}}


@pytest.mark.parametrize("optimizers", [1, 3])
@pytest.mark.parametrize("level", SKIPPING)
def test_a_batch_of_nan_is_skipped_and_training_goes_on(level: str, optimizers: int, capsys: Any) -> None:
    model, stayed = steps(level[:2], [1.0, NAN, 1.0, float("inf"), 1.0], optimizers, **SKIPPING[level])
    assert stayed == [False, True, False, True, False]
    assert is_finite(model)
    said = capsys.readouterr().out
    assert said.count(MESSAGE) == 2 * optimizers
    assert said.count("Amp post-mortem:  forward.  The loss is nan, scaled by 1.") == optimizers
    assert said.count("Amp post-mortem:  data.  The loss is nan, scaled by 1.") == optimizers


@pytest.mark.parametrize("clip", ["no", "amp", "torch"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["AdamW", "RMSprop"])
@pytest.mark.parametrize("level", ["O4", "O5, split"])
def test_so_it_is_in_every_loop(level: str, kind: str, loop: str, clip: str, capsys: Any) -> None:
    if level == "O5, split" and kind == "RMSprop":
        pytest.skip("has no step of ours")
    clips: dict[str, Callable[[Any], object]] = {
        "no": lambda optimizer: None,
        "amp": lambda optimizer: amp.clip_grad_norm_(optimizer, 1.0),
        "torch": lambda optimizer: nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0),
    }
    values = [1.0, NAN, 2.0]
    model, stayed = steps(level[:2], values, 1, LOOPS[loop], OPTIMIZERS[kind], clips[clip], **SKIPPING[level])
    assert stayed == [False, True, False]
    assert is_finite(model)
    assert capsys.readouterr().out.count(MESSAGE) == 1


def test_all_optimizers_of_a_loss_skip_or_none() -> None:
    model = nn.Linear(4, 2)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    amp.initialize(model, optimizers, opt_level="O4", verbosity=0)
    before = copy.deepcopy(model.state_dict())
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizers) as scaled_loss:
        scaled_loss.backward()
    model.bias.grad[0] = NAN
    for optimizer in optimizers:
        optimizer.step()
    assert_bitwise(model.state_dict(), before)


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each check appends the number of its gradients."""
    reads: list[int] = []
    run, look = kernels.ListCheck.run, kernels.ListCheck.look

    def counted_run(self: Any, tensors: Any, *args: Any) -> Any:
        reads.append(sum(t is not None for t in tensors))
        return run(self, tensors, *args)

    def counted_look(*args: Any) -> Any:
        if (found := look(*args)) is not None:
            reads.append(len(found.accesses) - found.accesses.count(tensor_lists.NONE))
        return found

    monkeypatch.setattr(kernels.ListCheck, "run", counted_run)
    monkeypatch.setattr(kernels.ListCheck, "look", counted_look)
    return reads


@pytest.mark.parametrize("loop", ["scale_loss", "plain"])
def test_gradients_are_read_once_before_a_step(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `amp.clip_grad_norm_` has read them for the norm, the step does not."""
    reads = counted_reads(monkeypatch)
    for clip in (lambda optimizer: None, lambda optimizer: amp.clip_grad_norm_(optimizer, 1.0)):
        reads.clear()
        steps("O4", [1.0, 1.0, 1.0], run=LOOPS[loop], clip=clip)
        # The first clipping reads them again: torch is asked to note writes from then on.
        assert sum(reads[-2:]) == 2 * 6
        amp.close()


def test_the_micro_batch_of_a_loss_that_is_not_finite_is_named(capsys: Any) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=1, num_losses=2)
    for _ in range(2):
        for i, value in enumerate((1.0, NAN, 1.0)):
            with amp.scale_loss(model(torch.full((3, 4), value)).square().mean(), optimizer, loss_id=i % 2) as loss:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    said = capsys.readouterr().out
    for cause in ("forward", "data"):
        assert f"loss scaler 1 is static at 1.0\nAmp post-mortem:  {cause}.  The loss is nan" in said


def test_a_plain_loop_says_that_the_loss_is_not_known(capsys: Any) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=1)
    capsys.readouterr()
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.full((3, 4), NAN)).square().mean().backward()
        optimizer.step()
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first == MESSAGE
    assert (
        "The loss is not known, scaled by 1.  Why is not known, as the loss was not passed to amp.scale_loss" in second
    )
    assert "Loss finite: not known.  Non-finite gradients: 2 of 2 (weight, bias).  The gradient of" in rest[-1]


@pytest.mark.parametrize(
    ("level", "keywords"),
    [
        ("O5", {"skip_on_overflow": False}),
        ("O4", {"skip_on_overflow": False}),
        ("O0", {}),
        ("O3", {}),
        ("O2", {"loss_scale": 1.0}),  # as apex
    ],
    ids=str,
)
@pytest.mark.parametrize("loop", ["scale_loss", "plain"])
def test_elsewhere_the_step_is_taken(level: str, keywords: Any, loop: str) -> None:
    model, stayed = steps(level, [NAN], run=LOOPS[loop], **keywords)
    assert stayed == [False]
    assert not is_finite(model)


@pytest.mark.parametrize("loop", ["scale_loss", "plain"])
@pytest.mark.parametrize("level", ["O0", "O2", "O4", "O5"])
def test_true_skips_at_every_level(level: str, loop: str) -> None:
    model, stayed = steps(level, [NAN, 1.0], run=LOOPS[loop], skip_on_overflow=True, loss_scale=1.0)
    assert stayed == [True, False]
    assert is_finite(model)


@pytest.mark.parametrize("level", ["O0", "O2", "O4", "O5"])
def test_true_skips_a_step_whose_closure_leaves_what_is_not_finite(level: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, skip_on_overflow=True, loss_scale=1.0, verbosity=0)

    def closure() -> torch.Tensor:
        loss = model(torch.full((1, 4), NAN)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert amp.last_step(optimizer).skipped
    assert is_finite(model)


@pytest.mark.parametrize("returned", [Tensor, float])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "LBFGS"])
def test_a_loss_in_a_closure_that_is_not_finite_is_told_at_its_step_at_o4(
    optimizer: str, returned: type, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 2)
    stepping = {**OPTIMIZERS, "LBFGS": torch.optim.LBFGS}[optimizer](model.parameters())
    amp.initialize(model, stepping, opt_level="O4")

    def closure(factor: float = 1.0) -> Any:
        stepping.zero_grad()
        loss = model(torch.full((1, 4), factor)).square().sum()
        loss.backward()
        return loss if returned is Tensor else loss.item()

    assert isinstance(stepping.step(closure), returned)
    assert "not checked" not in capsys.readouterr().out
    for _ in range(2):
        stepping.step(lambda: closure(NAN))
    said = capsys.readouterr().out
    assert said.count("The loss is nan, scaled by 1.  Gradients are not checked here, so the step is taken") == 1


def test_another_string_is_refused() -> None:
    with pytest.raises(AmpValueError, match=r"skip_on_overflow='never' is none of True, False and \"auto\""):
        steps("O5", [], skip_on_overflow="never")
