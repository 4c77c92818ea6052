"""Tied weights in what `model.state_dict()` gives: one memory, so that a file has them once."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import amp


class Ends(nn.Module):
    """One weight under three names, at different depths, and a buffer under two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
        self.decoder[1].weight = self.embedding.weight
        self.alias = self.decoder[1]
        self.register_buffer("table", torch.linspace(0.0, 1.0, 8))
        self.decoder[0].register_buffer("table", self.table)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.embedding(x) + self.table)


class Around(nn.Module):
    """A foreign module around two that are initialized."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, two


def file_size(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@pytest.mark.parametrize("keep_vars", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_tied_entries_of_a_state_dictionary_are_one_memory(level: str, keep_vars: bool) -> None:
    model = Ends()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(2):
        with amp.scale_loss(model(torch.arange(4)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    for owner, prefix in ((model, ""), (Around(model, model.decoder), "one.")):
        saved = owner.state_dict(keep_vars=keep_vars)
        names = [name for name in saved if saved[name].shape == (16, 8)]
        assert len(names) == (3 if owner is model else 4)
        assert {saved[name].data_ptr() for name in names} == {saved[prefix + "embedding.weight"].data_ptr()}
        assert saved[prefix + "table"].data_ptr() == saved[prefix + "decoder.0.table"].data_ptr()
    plain = Ends()
    assert file_size(model.state_dict()) < file_size(plain.state_dict()) + 64
