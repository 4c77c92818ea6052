"""Optimizers whose step is one pass over memory, with apex's signatures, and LARC around any optimizer."""

from amp_engine.optimizers.fused_adagrad import FusedAdagrad as FusedAdagrad
from amp_engine.optimizers.fused_adam import FusedAdam as FusedAdam
from amp_engine.optimizers.fused_lamb import FusedLAMB as FusedLAMB
from amp_engine.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from amp_engine.optimizers.fused_novograd import FusedNovoGrad as FusedNovoGrad
from amp_engine.optimizers.fused_sgd import FusedSGD as FusedSGD
from amp_engine.optimizers.larc import LARC as LARC
from amp_engine.optimizers.wrapped import inner_of as inner_of

__all__ = [
    "LARC",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
