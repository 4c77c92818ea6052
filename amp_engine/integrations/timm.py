"""timm: `AmpScaler()` in the place of `timm.utils.NativeScaler()`."""

from __future__ import annotations

from typing import Any

from amp_engine import amp
from amp_engine.integrations.extras import needs

with needs("timm"):
    from timm.utils import NativeScaler


class AmpScaler(NativeScaler):
    """timm's loss scaler for a model and an optimizer that `amp.initialize` took, at any level.

    Args:
        device: ignored; NativeScaler takes it.
    """

    def __init__(self, device: Any = None) -> None:
        self._scaler = amp.GradScaler()
