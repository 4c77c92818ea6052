"""`apex.amp.opt`."""

from amp_engine.compat.handle import OptimWrapper as OptimWrapper
