"""Mixed precision as people write it by hand in plain PyTorch: the yardstick of the levels' rounding error.

`amp_engine` may err at most twice as much as these loops, measured from the float64 truth of `oracle.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

Loss = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[list[Tensor]], Optimizer]


def cast_model(model: nn.Module, dtype: torch.dtype, *, keep_batchnorm: bool) -> nn.Module:
    """A copy of `model` in `dtype`, batch norm left in FP32 if asked."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if not (keep_batchnorm and isinstance(module, _BatchNorm)):
            for param in module.parameters(recurse=False):
                param.data = param.data.to(dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(dtype))
    return model


def cast_inputs(batch: Any, dtype: torch.dtype) -> Any:
    inputs, targets = batch
    return (inputs.to(dtype) if inputs.is_floating_point() else inputs), targets


class Widened(nn.Module):
    """Runs a half model and gives FP32 outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).float()


class Fp32Training:
    """O0: nothing but PyTorch."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, loss: Loss) -> None:
        self.model, self.loss = copy.deepcopy(model), loss
        self.optimizer = make(list(self.model.parameters()))

    def step(self, batch: Any) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def parameters(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]


class AutocastTraining(Fp32Training):
    """O1 and O4: torch.autocast with a constant loss scale."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, loss: Loss, dtype: torch.dtype, scale: float) -> None:
        super().__init__(model, make, loss)
        self.dtype, self.scale = dtype, scale

    def step(self, batch: Any) -> float:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=self.dtype):
            loss = self.loss(self.model, batch).float()
        (loss * self.scale).backward()
        for param in self.model.parameters():
            param.grad /= self.scale
        self.optimizer.step()
        return loss.item()


class MasterTraining:
    """O2 and O5: half weights, FP32 batch norm, FP32 masters, a constant loss scale."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, loss: Loss, dtype: torch.dtype, scale: float) -> None:
        self.half = cast_model(model, dtype, keep_batchnorm=True)
        self.model, self.loss, self.dtype, self.scale = Widened(self.half), loss, dtype, scale
        self.masters = [param.detach().clone() for param in model.parameters()]
        self.optimizer = make(self.masters)

    def step(self, batch: Any) -> float:
        self.half.zero_grad()
        loss = self.loss(self.model, cast_inputs(batch, self.dtype)).float()
        (loss * self.scale).backward()
        params = list(self.half.parameters())
        for param, master in zip(params, self.masters, strict=True):
            master.grad = param.grad.float() / self.scale
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, self.masters, strict=True):
                param.copy_(master)
        return loss.item()

    def parameters(self) -> list[Tensor]:
        return self.masters


class HalfTraining:
    """O3: everything in half."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, loss: Loss, dtype: torch.dtype) -> None:
        self.half = cast_model(model, dtype, keep_batchnorm=False)
        self.model, self.loss, self.dtype = Widened(self.half), loss, dtype
        self.optimizer = make(list(self.half.parameters()))

    def step(self, batch: Any) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, cast_inputs(batch, self.dtype))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def parameters(self) -> list[Tensor]:
        return [param.detach() for param in self.half.parameters()]
