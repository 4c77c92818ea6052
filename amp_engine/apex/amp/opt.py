"""`apex.amp.opt`."""

from amp_engine.handle import OptimWrapper as OptimWrapper
