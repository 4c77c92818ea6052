"""`apex.optimizers.fused_adagrad`."""

from amp_engine.optimizers.fused_adagrad import FusedAdagrad as FusedAdagrad
