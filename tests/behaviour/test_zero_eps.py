"""An `eps` that is 0 in float16 is told of at `initialize`, before it makes weights infinite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_engine import Engine
from amp_engine.optimizers import FusedAdam
from tests.models import MLP


def two_groups(params: Any, lr: float, second: float) -> torch.optim.Optimizer:
    first, *others = params
    return torch.optim.Adam([{"params": [first]}, {"params": others, "eps": second}], lr=lr, eps=1e-4)


CASES = {
    "AdamW": ("O3", torch.optim.AdamW, {}, "AdamW steps float16 weights in float16 here, where eps=1e-08 is 0"),
    "Adam, half of the smallest number": (
        "O3",
        torch.optim.Adam,
        {"eps": 2.0**-25},
        "where eps=2.9802322387695312e-08 is 0",
    ),
    "Adagrad": ("O3", torch.optim.Adagrad, {}, "Adagrad steps float16 weights in float16 here, where eps=1e-10 is 0"),
    "NAdam": ("O3", torch.optim.NAdam, {}, "NAdam steps float16 weights in float16 here, where eps=1e-08 is 0"),
    "RAdam": ("O3", torch.optim.RAdam, {}, "RAdam steps float16 weights in float16 here, where eps=1e-08 is 0"),
    "RMSprop": ("O3", torch.optim.RMSprop, {}, "RMSprop steps float16 weights in float16 here, where eps=1e-08 is 0"),
    "in the second group": ("O3", two_groups, {"second": 1e-8}, "Adam steps float16 weights in float16 here"),
    "in no group": ("O3", two_groups, {"second": 1e-3}, None),
    "NAdam, a larger one": ("O3", torch.optim.NAdam, {"eps": 1e-4}, None),
    "RMSprop, a larger one": ("O3", torch.optim.RMSprop, {"eps": 1e-4}, None),
    "torch's fused kernel, which computes in FP32": ("O3", torch.optim.AdamW, {"fused": True}, None),
    "a larger one": ("O3", torch.optim.AdamW, {"eps": 1e-4}, None),
    "the smallest that is not 0": ("O3", torch.optim.AdamW, {"eps": 2.0**-24}, None),
    "masters": ("O2", torch.optim.AdamW, {}, None),
    "FP32": ("O0", torch.optim.AdamW, {}, None),
    "computed in FP32": ("O3", FusedAdam, {}, None),
    "no eps": ("O3", torch.optim.SGD, {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_an_eps_that_float16_does_not_hold_is_told_of(case: str, capsys: Any) -> None:
    level, make, keywords, text = CASES[case]
    model = MLP.model()
    with Engine() as engine:  # one that has not said it yet
        engine.initialize(model, make(model.parameters(), lr=0.1, **keywords), opt_level=level)
    said = capsys.readouterr().out
    assert ("is 0: a weight whose second moment is 0" in said) is (text is not None)
    assert text is None or text in said
