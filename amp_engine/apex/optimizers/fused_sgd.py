"""`apex.optimizers.fused_sgd`."""

from amp_engine.optimizers.fused_sgd import FusedSGD as FusedSGD
