"""Multi-tensor operations, in plain PyTorch where nothing is compiled, and steps, which need compiled kernels."""

from amp_engine.kernels.backend import Checks as Checks
from amp_engine.kernels.blocks import CODES as CODES
from amp_engine.kernels.choice import has_native as has_native
from amp_engine.kernels.choice import missing as missing
from amp_engine.kernels.formulas import FORMULAS as FORMULAS
from amp_engine.kernels.formulas import Formula as Formula
from amp_engine.kernels.halves import REMAINDER as REMAINDER
from amp_engine.kernels.halves import REMAINDER24 as REMAINDER24
from amp_engine.kernels.halves import REMAINDERS as REMAINDERS
from amp_engine.kernels.layout import FLOATS as FLOATS
from amp_engine.kernels.layout import is_dense as is_dense
from amp_engine.kernels.layout import is_lazy as is_lazy
from amp_engine.kernels.layout import mark as mark
from amp_engine.kernels.layout import same_layout as same_layout
from amp_engine.kernels.list_check import ListCheck as ListCheck
from amp_engine.kernels.ops import accumulate_ as accumulate_
from amp_engine.kernels.ops import axpby_ as axpby_
from amp_engine.kernels.ops import cast_copy_ as cast_copy_
from amp_engine.kernels.ops import check as check
from amp_engine.kernels.ops import clip_factor as clip_factor
from amp_engine.kernels.ops import scale_ as scale_
from amp_engine.kernels.ops import update_scale_ as update_scale_
from amp_engine.kernels.steps import StepTable as StepTable
from amp_engine.kernels.steps import step_once as step_once
from amp_engine.kernels.steps import step_table as step_table

__all__ = [
    "FLOATS",
    "CODES",
    "REMAINDER",
    "REMAINDER24",
    "REMAINDERS",
    "Checks",
    "FORMULAS",
    "Formula",
    "ListCheck",
    "StepTable",
    "accumulate_",
    "axpby_",
    "cast_copy_",
    "check",
    "clip_factor",
    "has_native",
    "is_dense",
    "is_lazy",
    "mark",
    "missing",
    "same_layout",
    "scale_",
    "step_once",
    "step_table",
    "update_scale_",
]
