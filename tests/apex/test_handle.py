"""apex's older interface: amp.init() and its handle."""

from __future__ import annotations

import pytest
import torch

from amp_engine import amp
from amp_engine.apex_private.handle import Handle, NoOpHandle
from amp_engine.errors import AmpStateError
from tests.models import MLP


def test_init_returns_a_handle() -> None:
    handle = amp.init()
    assert isinstance(handle, Handle)
    assert handle.is_active()


@pytest.mark.parametrize("enabled", [True, False])
def test_an_optimizer_is_not_wrapped_and_the_error_says_what_to_call(enabled: bool) -> None:
    optimizer = torch.optim.SGD(MLP.model().parameters(), 0.1)
    with pytest.raises(AmpStateError, match=r"amp\.initialize\(model, optimizer, num_losses=2\)"):
        amp.init(enabled=enabled).wrap_optimizer(optimizer, num_loss=2)


def test_scale_loss_of_the_handle_says_that_it_is_gone() -> None:
    optimizer = torch.optim.SGD(MLP.model().parameters(), 0.1)
    with pytest.raises(RuntimeError, match=r"^The old Amp API is no longer supported\.  Please move to the new API, "):
        amp.init().scale_loss(torch.ones(()), optimizer)


def test_a_handle_that_does_nothing_scales_and_skips_nothing() -> None:
    handle = amp.init(enabled=False)
    assert isinstance(handle, NoOpHandle)
    loss = torch.ones(())
    optimizer = torch.optim.SGD(MLP.model().parameters(), 0.1)
    with handle.scale_loss(loss, optimizer) as other, handle._disable_casts():
        assert other is loss
    assert handle.is_active() is False
    handle._clear_cache()
    handle._deactivate()
