"""Optimizers whose step is one pass over memory, with apex's signatures."""

from amp_engine.optimizers.fused_adagrad import FusedAdagrad as FusedAdagrad
from amp_engine.optimizers.fused_adam import FusedAdam as FusedAdam
from amp_engine.optimizers.fused_lamb import FusedLAMB as FusedLAMB
from amp_engine.optimizers.fused_novograd import FusedNovoGrad as FusedNovoGrad
from amp_engine.optimizers.fused_sgd import FusedSGD as FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]
