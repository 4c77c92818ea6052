"""What the cast of an input loses is heard of without a wait."""

from __future__ import annotations

import warnings

import pytest
import torch

from amp_engine import AmpWarning, amp
from tests.gpu.support import GPU, no_sync

pytestmark = pytest.mark.cuda


def test_the_flag_of_an_input_travels_to_a_later_call():
    model = torch.nn.Linear(8, 2).to(GPU)
    amp.initialize(model, opt_level="O5", verbosity=0)
    x = (1000 + 0.01 * torch.randn(64, 8)).to(GPU)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with no_sync():
            for _ in range(3):
                model(x)
        torch.cuda.synchronize() if GPU.type == "cuda" else None
        model(x)
    said = [str(one.message) for one in caught if one.category is AmpWarning]
    assert len(said) == 1
    assert said[0].startswith("The cast of the argument 'input' of Linear to bfloat16 made distinct values equal")
