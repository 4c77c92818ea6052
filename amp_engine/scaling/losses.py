"""The loss scalers of one engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from amp_engine.errors import AmpIndexError
from amp_engine.levels.policy import LossScale, Skips
from amp_engine.scaling.history import ScaleHistory
from amp_engine.scaling.scaler import LossScaler
from amp_engine.scaling.snapshot import ScaleSnapshot


@dataclass
class Scaling:
    """The scalers, and the state that backwards and steps share through them; the engine writes it.

    Attributes:
        scalers: one for each loss_id.
        skips: the steps at a static scale that are skipped where gradients are not finite.
        latched: loss_id -> the scale by which `amp.scale` last multiplied; valid while the scaler still has it.
        reported: loss_ids whose static scale was reported to overflow, so that gradients need no further check.
        history: losses and their scales that have reached the host.
    """

    scalers: list[LossScaler] = field(default_factory=list)
    skips: Skips = Skips.NEVER
    latched: dict[int, ScaleSnapshot] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    history: ScaleHistory = field(default_factory=ScaleHistory)

    @property
    def is_active(self) -> bool:
        """True if each backward is checked, or may be scaled, so that nothing can run in a closure."""
        for scaler in self.scalers:  # no generator, as this runs before each step
            if not scaler.is_identity:
                return True
        return self.skips is Skips.ALWAYS

    def begin(
        self,
        loss_scale: LossScale,
        num_losses: int,
        min_loss_scale: float | None,
        max_loss_scale: float,
        skips: Skips,
    ) -> None:
        """Make new scalers for `initialize`."""
        self.skips = skips
        self.latched.clear()
        self.reported.clear()
        self.scalers = [
            LossScaler(loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
            for _ in range(num_losses)
        ]
        self.history.begin([scaler.loss_scale() for scaler in self.scalers])  # still on the CPU

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of `loss_id`. Raises AmpIndexError if there is none."""
        try:
            return self.scalers[loss_id]
        except (IndexError, TypeError):
            raise AmpIndexError(
                f"loss_id={loss_id!r}, but there are {len(self.scalers)} loss scalers (loss_id 0 to "
                f"{len(self.scalers) - 1}).  Call amp.initialize(..., num_losses=...) with the number of losses."
            ) from None

    def default(self) -> LossScaler:
        """Return the scaler of gradients without a loss_id: the first one."""
        return self.scalers[0] if self.scalers else LossScaler(1.0)
