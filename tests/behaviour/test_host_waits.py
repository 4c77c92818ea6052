"""Without compiled kernels an iteration on a GPU waits for the decision of each backward, and for nothing else.

torch.optim's own steps, which then are taken, cannot skip on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import amp
from tests.pretended_gpu import GPU, HostWaitError, PretendedGpu, pretended_gpu

LEVELS = ("O1", "O2", "O5")
# Backwards before each step, and the norm that it is clipped by.
STEPS = [(1, 2.0), (1, math.inf), (2, 2.0), (1, 2.0)]
BACKWARDS = sum(count for count, _ in STEPS)


def model_on(gpu: PretendedGpu) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    for tensor in (*model.parameters(), *model.buffers()):
        gpu.put(tensor)
    return model


def trained(gpu: PretendedGpu, level: str, make: Callable[[Any], Any], **options: Any) -> int:
    """Return how often the host waited for an event in STEPS."""
    model = model_on(gpu)
    optimizer = make(model.parameters())
    gpu.is_trapped = False
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **{"loss_scale": "dynamic", **options})
    gpu.is_trapped = True
    inputs = torch.randn(4, 8, device=GPU)
    for count, norm in STEPS:
        for _ in range(count):
            with amp.scale_loss(model(inputs).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
        amp.clip_grad_norm_(optimizer, 0.1, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # gradients of 0 are found by reading one
    return gpu.waits


@pytest.mark.parametrize("loss_scale", [128.0, "auto"])
def test_other_scales_wait_no_more_often(loss_scale: Any) -> None:
    with pretended_gpu() as gpu:
        assert trained(gpu, "O2", partial(torch.optim.AdamW, lr=1e-2), loss_scale=loss_scale) == BACKWARDS


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_of_torch_waits_for_each_decision(level: str, name: str) -> None:
    with pretended_gpu() as gpu:
        assert trained(gpu, level, partial(getattr(torch.optim, name), lr=1e-2)) == BACKWARDS


@pytest.mark.parametrize("is_scaled", [True, False], ids=["scale_loss", "plain"])
@pytest.mark.parametrize("clips", [True, False], ids=["clipped", ""])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
def test_at_o4_a_step_waits_once(make: Callable[[Any], Any], clips: bool, is_scaled: bool) -> None:
    with pretended_gpu() as gpu:
        model = model_on(gpu)
        optimizer = make(model.parameters())
        gpu.is_trapped = False
        amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
        gpu.is_trapped = True
        inputs = torch.randn(4, 8, device=GPU)
        for _ in range(4):
            loss = model(inputs).float().square().mean()
            if is_scaled:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            if clips:
                amp.clip_grad_norm_(optimizer, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert gpu.waits == 4


def operations_of_an_exit(gpu: PretendedGpu, layers: int) -> int:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    for parameter in model.parameters():
        gpu.put(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with amp.scale_loss(model(torch.ones(4, 8, device=GPU)).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
        before = gpu.operations
    return gpu.operations - before


def test_the_exit_takes_no_more_operations_for_more_parameters() -> None:
    counts = []
    for layers in (2, 9):
        with pretended_gpu() as gpu:
            counts.append(operations_of_an_exit(gpu, layers))
    assert counts[0] == counts[1]


# --- the pretended GPU --------------------------------------------------------------------------------


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t.sum()),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "to the host": lambda t: t.to("cpu"),
    "copy to the host": lambda t: torch.zeros(3).copy_(t),
    "copy from the host": lambda t: t.copy_(torch.zeros(3)),
    "from the host": lambda t: torch.zeros(3).to(GPU),
    "tensor": lambda t: torch.tensor(3.0, device=GPU),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "indices": lambda t: t[[0, 1]],
    "written indices": lambda t: t.__setitem__([0, 1], t[:2]),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_trapped(name: str) -> None:
    with pretended_gpu(), pytest.raises(HostWaitError):
        WAITS[name](torch.ones(3, device=GPU))


def test_what_does_not_wait_is_computed() -> None:
    with pretended_gpu() as gpu:
        there = torch.full((3,), 2.0, device=GPU)
        sent = torch.ones(3).to(GPU, non_blocking=True) + there[1]
        assert sent.device == there[:1].device == torch.zeros_like(sent.half()).device == GPU
        assert torch.ones(3).is_cpu
        host = torch.empty(3, pin_memory=True, device="cpu")
        host.copy_(sent, non_blocking=True)
        assert host.tolist() == [3.0] * 3
        with pytest.raises(AssertionError, match="takes a tensor of the host"):
            there + host
        assert gpu.waits == 0
