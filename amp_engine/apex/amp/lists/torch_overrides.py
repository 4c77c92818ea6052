"""`apex.amp.lists.torch_overrides`: functions of `torch`."""

import torch

from amp_engine.apex.amp.lists.function_list import FunctionList
from amp_engine.casting.lists import TORCH

MODULE = torch
FP16_FUNCS = FunctionList("half", MODULE, TORCH.half)
FP32_FUNCS = FunctionList("float", MODULE, TORCH.float)
CASTS = FunctionList("promote", MODULE, TORCH.promote + TORCH.sequence)
