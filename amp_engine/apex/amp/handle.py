"""`apex.amp.handle`."""

from amp_engine.amp import disable_casts as disable_casts
from amp_engine.amp import scale_loss as scale_loss
from amp_engine.apex_private.handle import Handle as AmpHandle
from amp_engine.apex_private.handle import NoOpHandle as NoOpHandle

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]
