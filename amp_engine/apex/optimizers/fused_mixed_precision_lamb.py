"""`apex.optimizers.fused_mixed_precision_lamb`."""

from amp_engine.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
