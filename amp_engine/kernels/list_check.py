"""The check: reads every gradient once, and unscales it in the same pass where there is an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_engine.kernels.backend import Checks, Looked, TensorList
from amp_engine.kernels.choice import NATIVE
from amp_engine.kernels.ops import checks_of, clip_factor, update_scale_
from amp_engine.kernels.refusals import check_lists


class ListCheck:
    """Checks and unscales a list in one pass; on a GPU the list's table stays for later passes until it changes."""

    def __init__(self) -> None:
        # By device: each has a table of its own tensors, and a list may be checked on several devices in turn.
        self._checks: dict[torch.device, Any] = {}

    def run(
        self,
        tensors: TensorList,
        outputs: TensorList | None,
        scale: Tensor,
        found_inf: Tensor,
        norm: Tensor,
        update: tuple[Any, ...] | None = None,
    ) -> Checks:
        """Check `tensors`; where there is an output, write `tensor / scale` into it. No host sync.

        Args:
            tensors: n; float16, bfloat16 or float32, dense, on one device; None is skipped.
            outputs: n, of the same shapes and strides, each possibly the tensor itself; for None nothing is written.
            scale: float32, shape []. Its reciprocal is taken in float64 and rounded once.
            found_inf: float32, shape []; set to 1 if an element is not finite, else unchanged.
            norm: float32, shape []; receives the 2-norm of all tensors divided by `scale`.
            update: all positional arguments of `update_scale_`, which is called last, with the same `found_inf`; None
                updates no scale.

        Returns:
            The findings about the values before any write; 0 for skipped tensors.
        """
        return Checks(*self._on(norm.device).run(tensors, outputs, scale, found_inf, norm, update))

    def look(
        self,
        params: Sequence[Tensor],
        plain: bytes,
        unscales: bool,
        keeps_half: bool,
        scale: Tensor,
        found_inf: Tensor,
        norm: Tensor,
        update: tuple[Any, ...] | None,
    ) -> Looked | None:
        """Check the gradients of `params` in one call, and unscale them if `unscales`. No host sync.

        Half gradients beside masters become float32, unless `keeps_half` leaves them, where all of these are half. All
        others are unscaled in place.

        Args:
            params: n, a result of `tensor_lists.params`.
            plain: n; 1 for a parameter without a master.
            scale, found_inf, norm, update: as in `run`.

        Returns:
            None, with nothing done, if there is no gradient, or the kernels cannot take each on the device of `norm`,
            or would unscale one with a graph.
        """
        found = self._on(norm.device).look(params, plain, unscales, keeps_half, scale, found_inf, norm, update)
        return None if found is None else Looked(Checks(*found[0]), *found[1:])

    def forget_gradients(self) -> None:
        """Keep no memory of gradients that `look` wrote."""
        for check in self._checks.values():
            check.forget_gradients()

    def clip_(self, tensors: TensorList, norm: Tensor, max_norm: float) -> None:
        """Multiply each tensor by `clip_factor` in float32, rounded once to the tensor's type. No host sync.

        Args:
            tensors: like those of `run`.
            norm: float32, shape [], on their device.
            max_norm: the largest norm.
        """
        self._on(norm.device).clip_(tensors, norm, max_norm)

    def _on(self, device: torch.device) -> Any:
        check = self._checks.get(device)
        if check is None:
            module = NATIVE.get(device.type)
            check = self._checks[device] = _PlainCheck() if module is None else module.ListCheck()
        return check


class _PlainCheck:
    """A `ListCheck` in plain PyTorch, which keeps nothing from one run to the next."""

    @torch.no_grad()
    def run(
        self,
        tensors: TensorList,
        outputs: TensorList | None,
        scale: Tensor,
        found_inf: Tensor,
        norm: Tensor,
        update: tuple[Any, ...] | None,
    ) -> Checks:
        """See `ListCheck.run`."""
        lists = {"xs": tensors} if outputs is None else {"xs": tensors, "outputs": outputs}
        check_lists("check", lists, ["outputs"][: len(lists) - 1], device=norm.device)
        checks = checks_of(tensors, norm.device)
        found_inf.copy_(torch.maximum(found_inf, checks.nonfinite.any().float()))
        norm.copy_((checks.sum_squares.sum().sqrt() / scale.double()).float())
        if outputs is not None:
            _scale(outputs, tensors, scale.double().reciprocal().float())
        if update is not None:
            update_scale_(*update)
        return checks

    def look(self, *_: object) -> None:
        """Return None: whoever calls it walks over the parameters in Python."""

    def forget_gradients(self) -> None:
        """Do nothing, as nothing is kept."""

    @torch.no_grad()
    def clip_(self, tensors: TensorList, norm: Tensor, max_norm: float) -> None:
        """See `ListCheck.clip_`."""
        check_lists("clip_", {"xs": tensors, "outputs": tensors}, ["outputs"], device=norm.device)
        _scale(tensors, tensors, clip_factor(norm, max_norm).float())


def _scale(outputs: TensorList, tensors: TensorList, factor: Tensor) -> None:
    pairs = [(o, t) for o, t in zip(outputs, tensors, strict=True) if o is not None and t is not None]
    in_place = [o for o, t in pairs if o is t and o.dtype is torch.float32]
    if in_place:
        torch._foreach_mul_(in_place, factor)
    for output, tensor in pairs:
        if output is not tensor or output.dtype is not torch.float32:
            output.copy_(tensor.float() * factor)
