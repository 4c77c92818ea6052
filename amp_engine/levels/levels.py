"""The optimization levels: O0 to O3 as apex defined them, O4 and O5 as their bfloat16 twins.

The names O4 and O5 are from ROCm's documentation. A bfloat16 level needs no loss scaling: the type has float32's range.
"""

from __future__ import annotations

import dataclasses

import torch

from amp_engine.errors import AmpStateError
from amp_engine.levels.policy import Policy

DISABLED = Policy()  # initialize(..., enabled=False)

# float32 model, no casts: the baseline.
O0 = Policy(
    enabled=True,
    opt_level="O0",
    cast_model_type=torch.float32,
    master_weights=False,
    loss_scale=1.0,
)

# float32 model; y = f(x.half(), w.half()) for listed f; the loss is scaled.
O1 = Policy(
    enabled=True,
    opt_level="O1",
    patch_torch_functions=True,
    patch_torch_functions_type=torch.float16,
    loss_scale="dynamic",
)

# half model, float32 batch norm; master -= lr * g.float() / scale; w = master.half().
O2 = Policy(
    enabled=True,
    opt_level="O2",
    cast_model_type=torch.float16,
    keep_batchnorm_fp32=True,
    master_weights=True,
    loss_scale="dynamic",
)

# half everything; no scaling unless asked for.
O3 = Policy(
    enabled=True,
    opt_level="O3",
    cast_model_type=torch.float16,
    keep_batchnorm_fp32=False,
    master_weights=False,
    loss_scale=1.0,
)

O4 = dataclasses.replace(O1, opt_level="O4", patch_torch_functions_type=torch.bfloat16, loss_scale=1.0)
O5 = dataclasses.replace(O2, opt_level="O5", cast_model_type=torch.bfloat16, loss_scale=1.0)

LEVELS = {"O0": O0, "O1": O1, "O2": O2, "O3": O3, "O4": O4, "O5": O5}

BRIEFS = {
    "O0": "O0:  Pure FP32 training.\n",
    "O1": "O1:  Insert automatic casts around Pytorch functions and Tensor methods.\n",
    "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n",
    "O3": "O3:  Pure FP16 training.\n",
    "O4": "O4:  Insert automatic casts to bfloat16 around Pytorch functions, FP32 weights, no loss scale.\n",
    "O5": "O5:  bfloat16 model with FP32 batchnorm and FP32 master weights, no loss scale.\n",
}


def level(opt_level: object) -> Policy:
    """Return the policy named `opt_level`. Raises AmpStateError for others, in apex's words."""
    if isinstance(opt_level, str) and opt_level in LEVELS:
        return LEVELS[opt_level]
    raise AmpStateError(
        f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'.  Note that in "
        "`O0`, `O1`, etc., the prefix O is the letter O, not the number zero.  'O4' and 'O5' are O1 and O2 in "
        f'bfloat16.  Use opt_level="{_meant(opt_level)}".'
    )


def _meant(opt_level: object) -> str:
    """Return the level that the user means by a type, as in "bf16" or "16-mixed", or by a number."""
    text = str(opt_level).strip().lower()
    casts = any(word in text for word in ("mixed", "amp", "auto", "casts"))
    if "bf" in text or "brain" in text:
        return "O4" if casts else "O5"
    if casts:
        return "O1"
    if "16" in text or "half" in text:
        return "O2"
    if any(word in text for word in ("32", "float", "full", "single")):
        return "O0"
    meant = "O" + text[-1:]
    return meant if meant in LEVELS else "O2"
