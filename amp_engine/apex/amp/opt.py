"""`apex.amp.opt`."""

from amp_engine.apex_private.handle import OptimWrapper as OptimWrapper
