"""`apex.optimizers.fused_novograd`."""

from amp_engine.optimizers.fused_novograd import FusedNovoGrad as FusedNovoGrad
