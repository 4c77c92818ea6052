"""`apex.amp.lists.functional_overrides`: functions of `torch.nn.functional`."""

import torch

from amp_engine.apex.amp.lists.function_list import FunctionList
from amp_engine.casting.lists import FUNCTIONAL

MODULE = torch.nn.functional
FP16_FUNCS = FunctionList("half", MODULE, FUNCTIONAL.half)
FP32_FUNCS = FunctionList("float", MODULE, FUNCTIONAL.float)
CASTS = FunctionList("promote", MODULE, FUNCTIONAL.promote + FUNCTIONAL.sequence)
