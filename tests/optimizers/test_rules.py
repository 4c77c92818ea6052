"""Hyperparameters that the kernels take from parameter groups: those of the optimizer's class, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_engine import amp
from amp_engine.optimizers import FusedAdam, FusedSGD
from amp_engine.optimizers.rules import rule_of

PARAM = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("kind", "foreign"),
    [
        (torch.optim.Adam, {"bias_correction": False}),
        (torch.optim.AdamW, {"bias_correction": False}),
        (torch.optim.SGD, {"decay_after_momentum": True}),
    ],
)
def test_entries_that_are_none_of_the_class_say_nothing(kind: Any, foreign: dict[str, Any]) -> None:
    plain, with_foreign = kind([PARAM], lr=0.1), kind([{"params": [PARAM], **foreign}], lr=0.1)
    rule = rule_of(plain)
    assert rule.hyperparameters(with_foreign.param_groups[0]) == rule.hyperparameters(plain.param_groups[0])


def test_state_of_a_fused_optimizer_steps_torchs_as_torch_does() -> None:
    """torch keeps the entries of groups that it loads."""

    def stepped(level: str | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer.load_state_dict(FusedAdam(model.parameters(), lr=0.1, bias_correction=False).state_dict())
        for group in optimizer.param_groups:
            group.update(
                amsgrad=False, maximize=False, foreach=None, capturable=False, differentiable=False, fused=None
            )
        if level is not None:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
        loss = model(torch.ones(2, 4)).float().square().mean()
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        return model.weight.detach().float().clone()

    plain = stepped(None)
    torch.testing.assert_close(stepped("O1"), plain, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("kind", "name"), [(FusedAdam, "eps"), (FusedSGD, "momentum"), (torch.optim.AdamW, "eps")])
def test_a_hyperparameter_that_is_missing_has_no_other_value(kind: Any, name: str) -> None:
    optimizer = kind([PARAM], lr=0.1)
    del optimizer.param_groups[0][name]
    with pytest.raises(KeyError, match=name):
        rule_of(optimizer).hyperparameters(optimizer.param_groups[0])
