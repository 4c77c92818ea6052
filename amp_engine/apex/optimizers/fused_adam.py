"""`apex.optimizers.fused_adam`."""

from amp_engine.optimizers.fused_adam import FusedAdam as FusedAdam
