"""Loops over parameters: the compiled ones, or the ones in Python; `backend.TensorLists` documents them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_engine.kernels.backend import GradientMarks as GradientMarks
from amp_engine.kernels.backend import Gradients as Gradients
from amp_engine.kernels.backend import Marks as Marks
from amp_engine.kernels.choice import TENSOR_LISTS
from amp_engine.kernels.layout import NONE as NONE
from amp_engine.kernels.layout import OTHER as OTHER
from amp_engine.kernels.layout import TAKEN as TAKEN
from amp_engine.kernels.layout import access_of as access_of
from amp_engine.kernels.layout import devices_of as devices_of
from amp_engine.kernels.layout import is_lazy as is_lazy
from amp_engine.kernels.layout import written_out as written_out

_GRAD: Any = torch.Tensor.grad

params = TENSOR_LISTS.params
marks = TENSOR_LISTS.marks
gradient_marks = TENSOR_LISTS.gradient_marks
gradients = TENSOR_LISTS.gradients
where = TENSOR_LISTS.where
unscaled_outputs = TENSOR_LISTS.unscaled_outputs
replace_gradients = TENSOR_LISTS.replace_gradients
any_gradient = TENSOR_LISTS.any_gradient
any_graph = TENSOR_LISTS.any_graph
any_other = TENSOR_LISTS.any_other
count_apart = TENSOR_LISTS.count_apart
same_objects = TENSOR_LISTS.same_objects
same_entries = TENSOR_LISTS.same_entries
discard_gradients = TENSOR_LISTS.discard_gradients


def asks_for_gradients(params: Sequence[Tensor]) -> bool:
    """True if a class of `params` has a `.grad` of its own, which `gradients` would bypass."""
    return any(getattr(kind, "grad", _GRAD) is not _GRAD for kind in set(map(type, params)))
