"""`apex.amp.lists.tensor_overrides`: functions of `torch.Tensor`."""

import torch

from amp_engine.apex.amp.lists.function_list import FunctionList
from amp_engine.casting.lists import TENSOR

MODULE = torch.Tensor
FP16_FUNCS = FunctionList("half", MODULE, TENSOR.half)
FP32_FUNCS = FunctionList("float", MODULE, TENSOR.float)
CASTS = FunctionList("promote", MODULE, TENSOR.promote + TENSOR.sequence)
