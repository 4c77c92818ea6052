"""Multi-tensor operations: one name each, one answer on every backend."""

from amp_engine.kernels.reference import accumulate_ as accumulate_
from amp_engine.kernels.reference import cast_copy_ as cast_copy_
from amp_engine.kernels.reference import nonfinite as nonfinite
from amp_engine.kernels.reference import unscale_ as unscale_
from amp_engine.kernels.reference import unscaled as unscaled
from amp_engine.kernels.reference import update_scale_ as update_scale_

__all__ = ["accumulate_", "cast_copy_", "nonfinite", "unscale_", "unscaled", "update_scale_"]
