"""`amp.GradScaler`: loops that are written for torch.amp.GradScaler, but for the constructor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from amp_engine import AmpStateError, AmpTypeError, amp
from tests.support import assert_bitwise, frozen, masters


def models(level: str, **options: Any) -> tuple[nn.Module, nn.Module, list[Any]]:
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 1)
    optimizers = [AdamW(body.parameters(), lr=1e-2, eps=1e-4), SGD(head.parameters(), lr=0.1)]
    amp.initialize([body, head], optimizers, opt_level=level, verbosity=0, **options)
    return body, head, optimizers


def batch(i: int, factor: float = 1.0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) * factor


def by_scaler(body: nn.Module, head: nn.Module, optimizers: list[Any], scaler: Any, i: int, factor: float) -> None:
    """Take one step of torch's own example: accumulation, clipping, two optimizers."""
    for k in range(2):
        scaler.scale(head(body(batch(2 * i + k, factor))).square().mean() / 2).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        amp.clip_grad_norm_(optimizer, 0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()


def by_amp(body: nn.Module, head: nn.Module, optimizers: list[Any], i: int, factor: float) -> None:
    for k in range(2):
        loss = head(body(batch(2 * i + k, factor))).square().mean() / 2
        with amp.scale_loss(loss, optimizers, delay_unscale=k == 0) as scaled_loss:
            scaled_loss.backward()
    for optimizer in optimizers:
        amp.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_a_loop_of_a_grad_scaler_trains_as_one_of_amp(level: str) -> None:
    outcomes = []
    for has_scaler in (True, False):
        body, head, optimizers = models(level)
        scaler = amp.GradScaler()
        scales = []
        for i in range(5):
            factor = 1e4 if i == 2 and level in ("O1", "O2") else 1.0  # the third overflows
            if has_scaler:
                by_scaler(body, head, optimizers, scaler, i, factor)
            else:
                by_amp(body, head, optimizers, i, factor)
            scales.append(amp.state_dict()["loss_scaler0"])
        outcomes.append((scales, [frozen(masters(one)) for one in optimizers]))
        assert scaler.get_scale() == scales[-1]["loss_scale"]
        amp.close()
    assert outcomes[0][0] == outcomes[1][0]
    assert_bitwise(outcomes[0][1], outcomes[1][1])


def test_the_scale_moves_once_for_all_optimizers_of_a_loss() -> None:
    body, head, optimizers = models("O1")
    scaler = amp.GradScaler(*optimizers)
    by_scaler(body, head, optimizers, scaler, 0, 1e30)
    assert scaler.get_scale() == 2.0**15
    by_scaler(body, head, optimizers, scaler, 1, 1.0)
    assert scaler.state_dict()["_growth_tracker"] == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_is_not_the_scalers_is_told_what_to_call(level: str) -> None:
    body, head, optimizers = models(level)
    scaler = amp.GradScaler()
    scaler.scale(head(body(batch(0))).float().sum()).backward()
    with pytest.raises(AmpStateError, match=r"amp\.GradScaler, call scaler\.step\(optimizer\)"):
        optimizers[0].step()
    for optimizer in optimizers:
        scaler.step(optimizer)


def test_what_a_scaler_saves_is_loaded_by_torch_and_by_ours() -> None:
    body, head, optimizers = models("O1", loss_scale=amp.DynamicLossScale(growth_interval=500, hysteresis=2))
    scaler = amp.GradScaler()
    by_scaler(body, head, optimizers, scaler, 0, 1e30)
    saved = scaler.state_dict()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(saved)
    assert (theirs.get_scale(), theirs.get_growth_interval()) == (2.0**16, 500)
    amp.close()
    models("O1", loss_scale=amp.DynamicLossScale(growth_interval=500, hysteresis=2))
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved
    assert saved["overflows_left"] == 1
    amp.load_state_dict(amp.convert_state_dict(theirs.state_dict(), "amp"))
    assert scaler.state_dict() != saved
    amp.load_state_dict(saved)
    assert scaler.state_dict() == saved
    assert amp.convert_state_dict(saved, "amp") == amp.state_dict()
    assert amp.convert_state_dict(saved, "torch")["growth_interval"] == 500


def test_a_scaler_loads_what_torch_saved() -> None:
    models("O1")
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0)
    theirs.scale(torch.ones(()))
    scaler = amp.GradScaler()
    scaler.load_state_dict(theirs.state_dict())
    assert scaler.get_scale() == 512.0
    scaler.update(new_scale=256.0)
    assert scaler.get_scale() == 256.0


def test_update_ends_a_scaled_loss_whose_backward_raised() -> None:
    body, head, _ = models("O2")
    scaler = amp.GradScaler()
    scaler.scale(head(body(batch(0))).square().mean())
    with pytest.raises(AmpStateError, match="inside"):
        amp.close()
    scaler.update()
    amp.close()


def test_a_loss_that_was_refused_leaves_a_scaler_as_it_was() -> None:
    body, head, optimizers = models("O2", num_losses=2)
    one, other = amp.GradScaler(loss_id=0), amp.GradScaler(loss_id=1)
    loss = one.scale(head(body(batch(0))).square().mean())
    with pytest.raises(AmpStateError, match="inside of its own body"):
        other.scale(head(body(batch(0))).square().mean())
    other.update()
    loss.backward()
    for optimizer in optimizers:
        one.step(optimizer)
    one.update()


def test_its_numbers_are_those_of_initialize() -> None:
    models("O1", loss_scale=amp.DynamicLossScale(growth_factor=4.0, backoff_factor=0.125, growth_interval=10))
    scaler = amp.GradScaler()
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.125, 10)


def test_disabled_it_passes_everything_through() -> None:
    scaler = amp.GradScaler()
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, enabled=False)
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    before = model.bias.item()
    scaler.scale(model(batch(0)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert model.bias.item() == pytest.approx(before - 0.3)


def test_a_device_in_place_of_optimizers_says_what_to_write() -> None:
    with pytest.raises(AmpTypeError, match=r"not a str: .*Type amp\.GradScaler\(\)"):
        amp.GradScaler("cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize("keywords", [{"enabled": False}, {"init_scale": 1024.0}])
def test_keywords_of_torchs_say_what_to_write(keywords: dict[str, Any]) -> None:
    with pytest.raises(AmpTypeError, match=rf"takes no {next(iter(keywords))}=.*amp.initialize\(..., enabled="):
        amp.GradScaler(**keywords)


@pytest.mark.parametrize(("level", "says"), [("O2", True), ("O5", False)])
def test_the_state_of_a_scaler_that_was_not_enabled_starts_anew(level: str, says: bool, capsys: Any) -> None:
    model = nn.Linear(2, 2)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level)
    capsys.readouterr()
    amp.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    assert (
        "the state_dict is empty, saved while amp or GradScaler was off: the loss scale starts anew"
        in capsys.readouterr().out
    ) is says
    assert amp.get_scale() == (2.0**16 if says else 1)


def test_several_losses_at_once_say_what_to_write() -> None:
    models("O1")
    with pytest.raises(AmpTypeError, match="takes one loss, not a list"):
        amp.GradScaler().scale([torch.ones(())])  # type: ignore[arg-type]


def test_a_loss_of_other_optimizers_is_refused() -> None:
    body, head, optimizers = models("O1")
    with pytest.raises(AmpStateError, match="reaches no parameter of its optimizers: SGD"):
        amp.GradScaler(optimizers[1]).scale(body(batch(0)).sum())
