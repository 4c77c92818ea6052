"""`apex.normalization`. The functions are in its submodule, `apex.normalization.fused_layer_norm`."""

from amp_engine.apex.normalization.fused_layer_norm import FusedLayerNorm as FusedLayerNorm
from amp_engine.apex.normalization.fused_layer_norm import FusedRMSNorm as FusedRMSNorm
from amp_engine.apex.normalization.fused_layer_norm import MixedFusedLayerNorm as MixedFusedLayerNorm
from amp_engine.apex.normalization.fused_layer_norm import MixedFusedRMSNorm as MixedFusedRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
