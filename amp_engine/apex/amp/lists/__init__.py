"""`apex.amp.lists`: which functions O1 casts, to read and to edit."""

from amp_engine.apex.amp.lists import functional_overrides as functional_overrides
from amp_engine.apex.amp.lists import tensor_overrides as tensor_overrides
from amp_engine.apex.amp.lists import torch_overrides as torch_overrides
