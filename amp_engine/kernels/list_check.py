"""Pass 1 of a step: look at every gradient once, and unscale those that users read."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_engine.kernels.backend import Checks, RepeatedCheck, TensorList
from amp_engine.kernels.choice import backend_for


class ListCheck:
    """`check` and `unscale_` over one list in one pass, again and again; on a GPU what did not change stays there."""

    def __init__(self) -> None:
        # By device, since what stays on one of them is of its own tensors: a list may be checked on each in turn.
        self._checks: dict[torch.device, RepeatedCheck] = {}

    def run(
        self,
        tensors: TensorList,
        outputs: TensorList | None,
        scale: Tensor,
        found_inf: Tensor,
        norm: Tensor,
    ) -> Checks:
        """Check `tensors`; where there is an output, write `tensor / scale` into it. No host sync.

        Args:
            tensors: n; float16, bfloat16 or float32, dense, on one device; None takes no part.
            outputs: n, of the same shapes and strides, each possibly the tensor itself; None writes nothing.
            scale: float32, shape []. Its reciprocal is taken in float64 and rounded once.
            found_inf: float32, shape []; set to 1 if an element is not finite, else left alone.
            norm: float32, shape []; receives the 2-norm of all tensors over `scale`.

        Returns:
            What was found, of the values before; 0 where a tensor takes no part.
        """
        return self._on(norm.device).run(tensors, outputs, scale, found_inf, norm)

    def multiply_(self, tensors: TensorList, factor: Tensor) -> None:
        """`t *= factor` for each, computed in float32 and rounded once to the type of t. No host sync.

        Args:
            tensors: as `run` has them.
            factor: float32, shape [], on their device.
        """
        self._on(factor.device).multiply_(tensors, factor)

    def _on(self, device: torch.device) -> RepeatedCheck:
        check = self._checks.get(device)
        if check is None:
            check = self._checks[device] = backend_for(device).repeated_check()
        return check
