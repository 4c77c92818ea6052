"""The state of an optimizer for each tensor: checks that the kernels can use it, and brings it into their form."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.ground.distributed import is_sharded, local_of
from amp_engine.kernels import blocks
from amp_engine.optimizers.rules import TORCH_RULES, Rule

NORM = "exp_avg_sq"  # where NovoGrad keeps the one norm of a tensor


class StateForm:
    """The form of `optimizer.state[p]` for a class of optimizers, by its rule.

    Attributes:
        moments: names of the state tensors that have their weights' shapes.
        is_ours: True if the class is one of this package's own.
        counts: True if steps are counted though the class keeps no count: stochastic rounding needs one.
        dtype: type of the moments: float32; for Adam and SGD also bfloat16, or uint8 for moments in blocks.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.moments = [rule.state1] if rule.state2 is None else [rule.state1, rule.state2]
        self.is_ours = rule not in TORCH_RULES.values()
        self.dtype = torch.float32
        self.counts = False

    @property
    def keeps_step(self) -> bool:
        """True if `state[p]["step"]` counts the steps."""
        return self._rule.keeps_step or self.counts

    def misfit(self, state: dict[str, Any], weight: Tensor) -> str | None:
        """Explain which part of a tensor's state the kernels cannot use, in any layout; None if they can use all.

        torch's SGD steps buffers of any type, and keeps the type; its Adam fails halfway on other types.
        """
        for name in self.moments:
            value = state.get(name)
            if value is None:
                continue
            is_shard = isinstance(value, Tensor) and is_sharded(value)
            value = local_of(value) if is_shard else value
            if isinstance(value, Tensor) and blocks.is_in_blocks(value, weight) and value.device == weight.device:
                continue
            if not isinstance(value, Tensor) or value.layout is not torch.strided or value.shape != weight.shape:
                return f"has a {name} that is no dense tensor of that shape"
            if value.device != weight.device:
                return f"is on {weight.device}, and its {name} on {value.device}"
            is_widened = self.is_ours or self._rule.keeps_step
            if not value.is_floating_point() or not (is_widened or value.dtype in (torch.float32, self.dtype)):
                return f"has a {name} of {value.dtype}"
            if is_shard and not self.fits(value, weight):
                return f"has a {name} in shards of another type, or in another order in memory"
        for name in ["step"] * self.keeps_step + [NORM] * self._rule.keeps_norm:
            value = state.get(name)
            if value is not None and not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)):
                return f"has a {name} that is no number"
        return None

    def torn(self, state: dict[str, Any], group: dict[str, Any]) -> str | None:
        """Explain what a partial state lacks, on which torch's own steps raise; None if it is complete or unstarted."""
        whole = self._whole(self._rule.needs_state1(group))
        missing = [name for name in whole if state.get(name) is None and not (self.counts and name == "step")]
        found = [name for name in whole if name not in ("step", *missing)]
        if not self.is_ours and self._rule.keeps_step and state:  # torch then needs all of it
            found = list(state)
        return f"has {' and '.join(found)}, but no {' and no '.join(missing)}" if found and missing else None

    def lacks(self, state: dict[str, Any], needs_state1: bool) -> bool:
        """True if a step would have to initialize some of the state."""
        return any(state.get(name) is None for name in self._whole(needs_state1))

    def _whole(self, needs_state1: bool) -> list[str]:
        moments = self.moments if needs_state1 else self.moments[1:]
        return moments + [NORM] * self._rule.keeps_norm + ["step"] * self.keeps_step

    def start(self, state: dict[str, Any], known: dict[int, float]) -> float:
        """Return the number of steps of this tensor; 0 if SGD, which may not count them, has no buffer."""
        step = state.get("step")
        if self._rule.keeps_step or step is not None and self.counts:
            return known[id(step)] if id(step) in known else 0.0 if step is None else float(step)
        buffer = state.get(self._rule.state1)
        return 0.0 if buffer is None else known.get(id(buffer), 1.0)

    def fill(self, state: dict[str, Any], weight: Tensor, group: dict[str, Any]) -> None:
        """Initialize missing state as torch does at a tensor's first gradient. A DTensor gets DTensor moments."""
        rule = self._rule
        if self.keeps_step and state.get("step") is None:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        for name in self.moments if rule.needs_state1(group) else self.moments[1:]:
            if state.get(name) is None:
                state[name] = self._zeros(weight)
        if rule.keeps_norm and state.get(NORM) is None:
            state[NORM] = torch.zeros((), dtype=torch.float32, device="cpu")

    def lay_out(self, state: dict[str, Any], weight: Tensor) -> None:
        """Bring the moments into `dtype` and the weight's order in memory: those of a checkpoint may differ."""
        for name in self.moments:
            value = state.get(name)
            if value is None or self.fits(local_of(value), weight):
                continue
            if self.dtype is not blocks.CODES:
                state[name] = self._zeros(weight).copy_(self.wide(name, value.detach(), weight))
            elif blocks.is_in_blocks(value, weight):
                state[name] = value.to(weight.device, blocks.CODES)
            else:
                value_f32 = torch.empty_like(weight, dtype=torch.float32, requires_grad=False).copy_(value.detach())
                state[name] = blocks.in_blocks(value_f32, self._code(name))

    def is_in_blocks(self, name: str, value: Tensor, weight: Tensor) -> bool:
        """True if state of `weight` is a moment in blocks."""
        return name in self.moments and blocks.is_in_blocks(value, weight)

    def wide(self, name: str, value: Tensor, weight: Tensor) -> Tensor:
        """Return a moment of `weight` as it is, or in float32 if it is in blocks."""
        return blocks.from_blocks(value, self._code(name), weight) if blocks.is_in_blocks(value, weight) else value

    def _code(self, name: str) -> Any:
        return blocks.FIRST if name == self._rule.state1 else blocks.SECOND

    def _zeros(self, weight: Tensor) -> Tensor:
        if self.dtype is blocks.CODES:
            return torch.zeros(blocks.size_in_blocks(weight.numel()), dtype=blocks.CODES, device=weight.device)
        return torch.zeros_like(weight, dtype=self.dtype, memory_format=torch.preserve_format, requires_grad=False)

    def kept(self, value: Tensor | None, weight: Tensor) -> Tensor | None:
        """Return the moment, or this rank's part of it; None if it is missing or its layout must change."""
        value = None if value is None else local_of(value)
        return value if self.fits(value, weight) else None

    def fits(self, value: Tensor | None, weight: Tensor) -> bool:
        """True if a moment has the type `dtype`, and its weight's device and order in memory."""
        if value is None or value.device != weight.device:
            return False
        if self.dtype is blocks.CODES:
            return value.dtype is blocks.CODES and blocks.is_in_blocks(value, weight)
        return value.dtype == self.dtype and kernels.is_dense(value) and kernels.same_layout(value, weight)
