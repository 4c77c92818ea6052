"""Casts on a GPU, whose kernels mix types otherwise than the CPU's; compiled casts; what is decided without a wait."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_engine import amp, kernels
from tests.gpu.support import GPU, no_sync

pytestmark = pytest.mark.cuda

HALF = {"O2": torch.float16, "O5": torch.bfloat16}
LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "convolution": lambda: nn.Conv1d(8, 8, 3, padding=1),
    "layer norm": lambda: nn.LayerNorm(8),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "recurrent": lambda: nn.LSTM(8, 8),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
}


class Around(nn.Module):
    """A half layer, `layer` given `dtype`, and a half layer again."""

    def __init__(self, layer, dtype):
        super().__init__()
        self.first, self.layer, self.last, self.dtype = nn.Linear(8, 8), layer, nn.Linear(8, 8), dtype

    def forward(self, x):
        x = self.layer(self.first(x).to(self.dtype))
        return self.last(x[0] if isinstance(x, tuple) else x)


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("came", ["half", "FP32 layer"])
def test_layers_take_either_type(name, level, came):
    torch.manual_seed(0)
    half = HALF[level]
    model = Around(LAYERS[name](), torch.float32).to(GPU)
    x = torch.randn(8, 8, 8, device=GPU)
    twin = model(x).detach()
    model.dtype = torch.float32 if came == "half" else half
    if came == "half":
        model.to(half)
    else:
        model.first.to(half)
        model.last.to(half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    out = model(x)
    torch.testing.assert_close(out, twin, rtol=0.05, atol=0.05)
    with amp.scale_loss(out.square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("level", HALF)
def test_rotary_tables_stay_fp32_and_the_bits_of_a_half_model_stay(level):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(16, 16)
            self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, 16, 2) / 16), persistent=False)

        def forward(self, x):
            angles = torch.arange(x.shape[-2], device=x.device).float()[:, None] * self.inv_freq
            even, odd = self.query(x).chunk(2, -1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)

    torch.manual_seed(0)
    model = Rotary().to(GPU)
    for p in model.parameters():
        p.data = p.data.to(HALF[level])
    x = torch.randn(2, 1500, 16, device=GPU, dtype=HALF[level])
    expected = model(x)
    amp.initialize(model, opt_level=level, verbosity=0)
    assert torch.equal(model(x.float()), expected.float())


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated")
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_compiled_convolution_in_a_kept_module_computes_in_fp32(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).to(GPU)
    amp.keep_float(model[1])
    amp.initialize(model, opt_level=level, verbosity=0)
    x = torch.randn(2, 3, 16, 16, device=GPU)
    expected = model(x)
    compiled = torch.compile(model)(x)
    assert compiled.dtype is expected.dtype
    torch.testing.assert_close(compiled, expected, rtol=0.02, atol=0.02)


@pytest.mark.skipif(not kernels.has_native(GPU), reason="needs compiled kernels, which read the flag on the GPU")
def test_a_plain_loop_at_o4_skips_a_step_without_a_wait():
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    x = torch.randn(4, 8, device=GPU)
    bad = torch.full((4, 8), torch.nan, device=GPU)

    def step(x):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    step(x)
    before = [p.detach().clone() for p in model.parameters()]
    with no_sync():
        step(bad)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    step(x)  # tells of the skip, and reads which gradients it was for
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
