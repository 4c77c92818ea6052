"""`apex.optimizers.fused_lamb`."""

from amp_engine.optimizers.fused_lamb import FusedLAMB as FusedLAMB
