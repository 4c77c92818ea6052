"""`apex.amp._process_optimizer`."""

from amp_engine.compat.face import Stash as AmpOptimizerState

__all__ = ["AmpOptimizerState"]
