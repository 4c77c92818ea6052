"""What an engine saves and loads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from amp_engine import scaler_state
from amp_engine.errors import AmpStateError
from amp_engine.policy import Policy
from amp_engine.report import Reporter
from amp_engine.scaler import LossScaler
from amp_engine.scaler_state import ScalerFormat


class Saving:
    """The part of an Engine that concerns checkpoints.

    Being `Stateful`, it goes into a dictionary that torch.distributed.checkpoint saves.
    """

    policy: Policy | None
    reporter: Reporter

    @property
    def scalers(self) -> list[LossScaler]:
        """One for each loss_id."""
        raise NotImplementedError

    def state_dict(
        self, destination: OrderedDict[str, Any] | None = None, *, format: ScalerFormat = "amp"
    ) -> OrderedDict[str, Any]:
        """`{"loss_scaler0": {"loss_scale": float, "unskipped": int, "dynamic": bool, ...}, ...}`; empty if not enabled.

        Waits for the device once a dynamic scaler. Masters are saved by `model.state_dict()`. `format` "apex" leaves
        two numbers an entry; "torch" is for one GradScaler, see `amp.convert_state_dict`.
        """
        policy = self._initialized_policy("state_dict")
        return scaler_state.pack_scalers(self.scalers, policy.opt_level, destination, format)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the loss scalers from what `state_dict`, apex or a GradScaler wrote, at this level or another.

        Static scales stay; dynamic ones go on from dynamic ones, and else start at the first scale.
        Raises AmpStateError for keys that are no loss scaler's, after loading the others.
        """
        self._initialized_policy("load_state_dict")
        scaler_state.unpack_scalers(self.scalers, state_dict, lambda text: self.reporter.say(text, rank0=True))

    def _initialized_policy(self, call: str) -> Policy:
        if self.policy is None:
            raise AmpStateError(
                f"amp.{call}() was called before amp.initialize(), so there are no loss scalers.  Call "
                "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
            )
        return self.policy
