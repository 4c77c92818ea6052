"""Warns once a model of a loss that its forward computed in half, of outputs that stay half, and of torch.autocast."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amp_engine.casting.inputs import CALLS, floats_in
from amp_engine.casting.regions import TAKE_AUTOCAST_OUT, is_in_autocast
from amp_engine.errors import AmpRuntimeWarning, AmpWarning
from amp_engine.ground.callers import warn
from amp_engine.ground.containers import attributes_not_walked
from amp_engine.ground.dtypes import LOW_PRECISION, dtype_name


class ModelWarnings:
    """Each warning of one model is said once; its copies go on as it was when they were made."""

    def __init__(self) -> None:
        self._outputs_to_look_at = CALLS
        self._is_autocast_said = False

    def be_quiet(self) -> None:
        """Look at no output."""
        self._outputs_to_look_at = 0

    def look_at_output(self, output: Any, class_name: str) -> None:
        """Warn, in the first calls, of a single number in half that a backward may begin at. No host sync."""
        if self._outputs_to_look_at <= 0 or not torch.is_grad_enabled():
            return
        found = [one for one in floats_in(output) if one.requires_grad]
        self._warn_of_class(output, class_name)
        self._outputs_to_look_at -= bool(found)
        half = next((one.dtype for one in found if one.dim() == 0 and one.dtype in LOW_PRECISION), None)
        if half is not None:
            self._outputs_to_look_at = 0
            bits = round(1 - math.log2(torch.finfo(half).eps))
            warn(
                f"{class_name} returns a number that its forward computed in {dtype_name(half)}, with {bits} "
                "significant bits.  If it is the loss, compute it in FP32: write logits.float() where the forward "
                "passes them to the loss, or return the logits and compute the loss outside of the model "
                "(transformers.Trainer: compute_loss_func).  This is said once.",
                AmpWarning,
            )

    def _warn_of_class(self, output: Any, class_name: str) -> None:
        """Warn of half tensors that are attributes of an object into which no cast looks."""
        inside = attributes_not_walked(output)
        found = [name for name, one in inside.items() if isinstance(one, Tensor) and one.requires_grad]
        half = next((name for name in found if inside[name].dtype in LOW_PRECISION), "")
        if half:
            self._outputs_to_look_at = 0
            kind = type(output).__name__
            warn(
                f"{class_name} returns a {kind}, whose attributes no cast reaches: {half} stays "
                f"{dtype_name(inside[half].dtype)}, and a loss of it is computed so.  Make {kind} a dataclass, whose "
                "tensors become FP32, or write .float() in the forward.  This is said once.",
                AmpWarning,
            )

    def warn_of_autocast(self) -> None:
        """Warn of a call inside of torch.autocast."""
        if is_in_autocast() and not self._is_autocast_said:
            self._is_autocast_said = True
            warn(
                "A model that amp.initialize cast is called inside of torch.autocast, which casts once more: some "
                f"functions then compute in another type than the level says.  {TAKE_AUTOCAST_OUT}  This is said once.",
                AmpRuntimeWarning,
            )
