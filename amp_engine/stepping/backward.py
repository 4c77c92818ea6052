"""What one backward left: what was found in its gradients, and what that means for the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import kernels
from amp_engine.devices import HostNumber
from amp_engine.kernels import walk
from amp_engine.scaler import LossScaler
from amp_engine.stepping.lazy_gradients import Kept, Unscaling
from amp_engine.stepping.master_weights import MasterWeights
from amp_engine.stepping.roster import roster_of

NO_LOSS = torch.zeros((), device="cpu")


class Checked(NamedTuple):
    """What one look at a list of gradients found.

    Attributes:
        params: n; the model's parameters.
        arrived: n; 0 where no gradient was looked at.
        checks: of the gradients as they arrived, still scaled; 0 where none did.
    """

    params: Sequence[nn.Parameter]
    arrived: bytes
    checks: kernels.Checks


class PassOne(NamedTuple):
    """One backward's gradients, all of them, as long as nobody has touched them.

    Attributes:
        checked: one entry for each of the optimizer's parameters, in the order of its groups.
        norm: of all unscaled gradients; float32, shape [].
        unscaling: what the kept ones are still to be multiplied by.
        weights: what the optimizer stepped at that time.
        kept: gradients of masters; None if there are no masters.
        plain: gradients that are unscaled already; None if there are none.
    """

    checked: Checked
    norm: Tensor
    unscaling: Unscaling
    weights: Sequence[nn.Parameter]
    kept: Kept | None
    plain: Unscaled | None

    def holds(self, optimizer: Optimizer, masters: MasterWeights | None) -> bool:
        """Whether `optimizer` still steps the same, and every gradient is still what was looked at."""
        return (
            walk.same_objects(roster_of(optimizer, masters).weights, self.weights)
            and (self.kept is None or self.kept.is_whole)
            and (masters is None or not walk.any_gradient(masters.weights))
            and (self.plain is None or self.plain.is_untouched())
        )


class Unscaled(NamedTuple):
    """Gradients that were unscaled in place, as they were then.

    Attributes:
        param_handle: the parameters without masters, as `Roster` has them.
        grads: their gradients, alive, so that no other tensor is taken for one of them; None elsewhere.
        stamps: of these.
    """

    param_handle: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    stamps: walk.GradientStamps

    def is_untouched(self) -> bool:
        """Whether each gradient is the same object with the same version."""
        return walk.have_gradient_stamps(self.param_handle, self.stamps)


@dataclass
class Verdict:
    """What one backward decided for every optimizer of its `scale_loss`."""

    loss_id: int
    scaler: LossScaler
    found_inf: Tensor  # float32, shape []: != 0 is an overflow
    overflow: HostNumber  # the same on its way to the host
    adjusted: HostNumber  # and the scale after it
    skips: bool  # whether an overflow skips the step, or is only reported
    checked: list[Checked]
    loss: Tensor
