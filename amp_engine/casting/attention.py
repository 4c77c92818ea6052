"""O1 for torch.nn.attention: flex_attention, and masks that hold no values."""

from __future__ import annotations

import importlib
from typing import Any

import torch.nn.functional as F

from amp_engine.casting import wrappers
from amp_engine.casting.patches import Patches
from amp_engine.casting.replacements import original


def cast_attention(patches: Patches, current: wrappers.Current) -> None:
    """Cast the tensors that flex_attention is given, and have CausalBias know the patched attention."""
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")  # imports Dynamo, as the next one does
    masks: Any = importlib.import_module("torch.nn.attention.bias")
    half = wrappers.throughout(wrappers.half)
    patches.set(flex, "flex_attention_hop", half(flex.flex_attention_hop, current, "torch.nn.attention.flex_attention"))

    patched = F.scaled_dot_product_attention
    attention, override = original(patched), masks.CausalBias.__torch_function__.__func__

    def with_patched(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return override(cls, patched if func is attention else func, types, args, kwargs)

    patches.set(masks.CausalBias, "__torch_function__", classmethod(with_patched))
