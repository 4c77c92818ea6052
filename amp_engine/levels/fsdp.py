"""FSDP2 at the levels that cast models: `fully_shard` casts, its FP32 shards are the masters, and we look after them.

`fully_shard` gathers its FP32 shards in half for forward and backward, and reduces gradients in FP32: what O2 and O5
do to a model, by a policy that has no public setter afterwards. So users pass the policy, and `initialize` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_engine.errors import AmpStateError
from amp_engine.ground.distributed import has_fsdp2, is_fsdp2, is_sharded
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.ground.torch_private import BatchNormBase, fsdp_policy_of
from amp_engine.levels.levels import level as level_named
from amp_engine.levels.policy import Policy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def fsdp_policy(opt_level: str, root: bool = False) -> MixedPrecisionPolicy:
    """The `mp_policy` with which `fully_shard` is called for a level, before `initialize` at that level.

        for block in model.blocks:
            fully_shard(block, mp_policy=amp.fsdp_policy("O2"))
        fully_shard(model, mp_policy=amp.fsdp_policy("O2", root=True))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")

    At O2 and O5 parameters are gathered in half and gradients reduced in FP32. A batch norm, FP32 at these levels, is
    a unit of its own: `fully_shard(norm, mp_policy=amp.fsdp_policy("O0"))`. The other levels cast elsewhere, or not at
    all, so theirs casts nothing; at O3 call `model.half()` first.

    Args:
        opt_level: "O0" to "O5".
        root: whether it is for the outermost call, whose outputs become FP32, as the level's are.

    Returns a torch.distributed.fsdp.MixedPrecisionPolicy. Raises AmpStateError for what is no level.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # which takes a second

    policy = level_named(opt_level)
    if not policy.master_weights:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=policy.cast_model_type or None,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32 if root else None,
    )


def is_cast_by_fsdp2(model: nn.Module, policy: Policy) -> bool:
    """Whether `fully_shard` casts `model` as `policy` asks, if `check_units` lets it pass."""
    return bool(policy.master_weights) and policy.cast_model_type in LOW_PRECISION and has_fsdp2(model)


def check_units(model: nn.Module, policy: Policy, gives_float32: bool = True) -> None:
    """Raise AmpStateError unless each unit of `model` was sharded with the `mp_policy` of this level.

    Args:
        gives_float32: whether the outputs of the model are to be FP32.
    """
    level, half = policy.opt_level, policy.cast_model_type
    for name, param in model.named_parameters():
        if not is_sharded(param):
            raise AmpStateError(
                f"Parameter {name} of {type(model).__name__} is in no unit of fully_shard, while others are.  Call "
                f"fully_shard(model, mp_policy=amp.fsdp_policy({level!r}, root=True)) around all of them, then make "
                "the optimizer, then call amp.initialize."
            )
        if param.dtype is not torch.float32:
            raise AmpStateError(
                f"Parameter {name} of {type(model).__name__} is a shard in {param.dtype}, where the FP32 master of "
                f"{level} belongs.  Call model.float() before fully_shard."
            )
    for name, unit in model.named_modules():
        if not is_fsdp2(unit):
            continue
        theirs = fsdp_policy_of(unit)
        own = [module for module in _own_modules(unit) if next(module.parameters(recurse=False), None) is not None]
        norms = [module for module in own if isinstance(module, BatchNormBase) and policy.keep_batchnorm_fp32]
        called = f"model.{name}" if name else "model"
        if norms and len(norms) < len(own):
            raise AmpStateError(
                f"{called} has a {type(norms[0]).__name__} in its unit of fully_shard, which {level} keeps in FP32.  "
                "Call fully_shard(norm, mp_policy=amp.fsdp_policy('O0')) on each batch norm before fully_shard of "
                "what is around it."
            )
        if norms:
            if theirs.param_dtype not in (None, torch.float32):
                raise AmpStateError(_text(called, "param_dtype", theirs.param_dtype, "O0", False))
            continue
        is_root = unit is model
        expected = {"param_dtype": half, "reduce_dtype": torch.float32} if own else {}
        if is_root and gives_float32:
            expected["output_dtype"] = torch.float32
        for what, dtype in expected.items():
            found = getattr(theirs, what)
            if found is not dtype:
                raise AmpStateError(_text(called, what, found, level, is_root))


def _text(called: str, what: str, found: Any, level: str | None, is_root: bool) -> str:
    root = ", root=True" if is_root else ""
    return (
        f"{called} was sharded with MixedPrecisionPolicy({what}={found}), by which it is not trained as {level} says.  "
        f"Call fully_shard({called}, mp_policy=amp.fsdp_policy({level!r}{root})), then make the optimizer, then call "
        "amp.initialize."
    )


def _own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """`unit` and the modules in it, but those of units inside."""
    yield unit
    for child in unit.children():
        if not is_fsdp2(child):
            yield from _own_modules(child)
