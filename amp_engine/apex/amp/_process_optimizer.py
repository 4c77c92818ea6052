"""`apex.amp._process_optimizer`."""

from amp_engine.initialization.apex_face import Stash as AmpOptimizerState

__all__ = ["AmpOptimizerState"]
