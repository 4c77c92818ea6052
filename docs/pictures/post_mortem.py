"""Draw what amp_engine prints of a module that overflows float16, and what find_overflow adds."""

import contextlib
import io

import torch
import torch.nn.functional as F
from svg import terminal
from torch import nn

from amp_engine import amp


class Gate(nn.Module):
    """A gate that is too steep for float16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its output is inf where `gate` is over 11."""
        return self.up(x) * self.gate(x).exp()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), Gate(16), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(4, 8) * 60, torch.randn(4, 4)
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    for _ in range(2):
        with amp.scale_loss(F.mse_loss(model(x), y), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    print("\n>>> print(amp.find_overflow(lambda: loss_fn(model(x), y)))")
    print(amp.find_overflow(lambda: F.mse_loss(model(x), y)))
overflows = printed.getvalue().partition("Gradient overflow")
terminal(__file__, "Two skipped steps: the second report names the operation and what to do", "".join(overflows[1:]))
