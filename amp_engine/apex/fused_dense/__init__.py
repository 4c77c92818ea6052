"""`apex.fused_dense`."""

from amp_engine.apex.fused_dense.fused_dense import FusedDense as FusedDense
from amp_engine.apex.fused_dense.fused_dense import FusedDenseGeluDense as FusedDenseGeluDense

__all__ = ["FusedDense", "FusedDenseGeluDense"]
