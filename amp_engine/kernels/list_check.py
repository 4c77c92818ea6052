"""Pass 1 of a step: look at every gradient once, and unscale those that users read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_engine.kernels import _native, reference
from amp_engine.kernels.reference import Checks
from amp_engine.kernels.refusals import TensorList, check_lists
from amp_engine.kernels.table import has_native, native_call


class ListCheck:
    """`check` and `unscale_` over one list in one pass, again and again; on a GPU what did not change stays there."""

    def __init__(self) -> None:
        self._native = None if _native.module is None else _native.module.ListOperation()

    def run(
        self,
        tensors: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None] | None,
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
        device = norm.device
        if self._native is not None and has_native(device):
            return Checks(*native_call(self._native.check, tensors, outputs, scale, True, found_inf, norm, scale))
        return self._run_reference(tensors, outputs, scale, found_inf, norm)

    @torch.no_grad()
    def _run_reference(
        self,
        tensors: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None] | None,
        scale: Tensor,
        found_inf: Tensor,
        norm: Tensor,
    ) -> Checks:
        device = norm.device
        lists: dict[str, TensorList] = {"xs": tensors}
        if outputs is not None:
            lists["outputs"] = outputs
        check_lists("check", lists, written=[name for name in lists if name == "outputs"], device=device)
        given = [i for i, t in enumerate(tensors) if t is not None]
        present = [t for t in tensors if t is not None]
        found = reference.check(present)
        inv_scale = scale.double().reciprocal().float()
        checks = Checks(
            torch.zeros(len(tensors), dtype=torch.bool, device=device),
            torch.zeros(len(tensors), dtype=torch.float64, device=device),
            torch.zeros(len(tensors), dtype=torch.float32, device=device),
        )
        for whole, part in zip(checks, found, strict=True):
            whole[given] = part
        found_inf.copy_(torch.maximum(found_inf, checks.nonfinite.any().float()))
        norm.copy_((checks.sum_squares.sum().sqrt() / scale.double()).float())
        if outputs is not None:
            pairs = [(o, t) for o, t in zip(outputs, tensors, strict=True) if o is not None and t is not None]
            reference.scale_([o for o, _ in pairs], [t for _, t in pairs], inv_scale)
        return checks
