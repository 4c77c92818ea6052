"""`apex.amp._process_optimizer`."""

from amp_engine.views import Stash as AmpOptimizerState

__all__ = ["AmpOptimizerState"]
