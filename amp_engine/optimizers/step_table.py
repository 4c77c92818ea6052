"""The tensors that the kernels step together, with their optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.ground.devices import moved
from amp_engine.ground.distributed import local_of
from amp_engine.kernels import tensor_lists
from amp_engine.optimizers.rules import Rule
from amp_engine.optimizers.state_form import NORM


class Table:
    """The tensors of one device. `rows` are their places among the optimizer's tensors; None: all of its tensors."""

    def __init__(
        self,
        rule: Rule,
        *,
        rows: list[int] | None,
        device: torch.device,
        weights: list[Tensor | None],
        copies: list[Tensor | None],
        groups: list[int],
        inner: list[dict[str, Any]],
        start: list[float],
        adopts: bool,
        keeps_step: bool,
    ) -> None:
        self.rows = rows
        self.device = device
        self.is_captured = False  # in a CUDA graph
        self.inner = inner
        self.steps = moved(torch.tensor(start, dtype=torch.float32, device="cpu"), device)
        state1: list[Tensor | None] = [state.get(rule.state1) for state in inner]
        state2: list[Tensor | None] = [state.get(rule.state2) if rule.state2 else None for state in inner]
        self._entries = [(rule.state1, state1)]
        if rule.state2 is not None:
            self._entries.append((rule.state2, state2))
        self._counts = state1
        if keeps_step:
            self._counts = _put(inner, "step", self.steps)
            self._entries.append(("step", self._counts))
        norms = None
        if rule.keeps_norm:
            known = [float(state.get(NORM) or 0.0) for state in inner]
            norms = moved(torch.tensor(known, dtype=torch.float32, device="cpu"), device)
            self._entries.append((NORM, _put(inner, NORM, norms)))
        self.native = kernels.step_table(
            rule.formula, weights, copies, _local(state1), _local(state2), groups, self.steps, norms, adopts
        )

    def is_current(self) -> bool:
        """True if the table still points to the optimizer's state."""
        return tensor_lists.same_entries(self.inner, self._entries) and self.native.is_current()

    def by_state(self) -> list[tuple[Tensor, float]]:
        """Return pairs of a state tensor and its step count. Waits for the device."""
        pairs = zip(self._counts, self.steps.tolist(), strict=True)
        return [(tensor, count) for tensor, count in pairs if tensor is not None]


def _put(inner: list[dict[str, Any]], name: str, numbers: Tensor) -> list[Tensor | None]:
    """Replace each number in `inner` under `name` by a view of its place in `numbers`; return n views or None."""
    views: list[Tensor | None] = []
    for state, view in zip(inner, numbers.unbind(), strict=True):
        if state.get(name) is None:
            views.append(None)
        else:
            state[name] = view
            views.append(view)
    return views


def _local(states: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return this rank's parts of DTensors, and other tensors unchanged."""
    return [None if state is None else local_of(state) for state in states]
