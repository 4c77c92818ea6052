"""`apex.optimizers`."""

# apex had this class here until 2019, and scripts of those years import it from here.
from amp_engine.apex.fp16_utils import FP16_Optimizer as FP16_Optimizer
from amp_engine.apex.optimizers.fused_adagrad import FusedAdagrad as FusedAdagrad
from amp_engine.apex.optimizers.fused_adam import FusedAdam as FusedAdam
from amp_engine.apex.optimizers.fused_lamb import FusedLAMB as FusedLAMB
from amp_engine.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from amp_engine.apex.optimizers.fused_novograd import FusedNovoGrad as FusedNovoGrad
from amp_engine.apex.optimizers.fused_sgd import FusedSGD as FusedSGD
