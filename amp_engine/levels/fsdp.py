"""FSDP at each level: shards that `initialize` refuses, and FSDP2's policy at the levels that cast models.

`fully_shard` gathers its FP32 shards, which are the masters, in half for forward and backward, and reduces gradients
in FP32, as O2 and O5 do. The policy has no public setter after `fully_shard`, so users pass the policy to it, and
`initialize` reads the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_engine.errors import AmpStateError
from amp_engine.ground.distributed import (
    fsdp1_around,
    fsdp1_in,
    fsdp2_param_dtypes,
    has_fsdp2,
    is_fsdp2,
    is_sharded,
)
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.ground.torch_private import BatchNormBase, fsdp_policy_of
from amp_engine.levels.levels import level as level_named
from amp_engine.levels.policy import Policy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def fsdp_policy(opt_level: str, root: bool = False) -> MixedPrecisionPolicy:
    """Return the `mp_policy` for calls of `fully_shard` before `initialize` at a level.

        for block in model.blocks:
            fully_shard(block, mp_policy=amp.fsdp_policy("O2"))
        fully_shard(model, mp_policy=amp.fsdp_policy("O2", root=True))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")

    At O2 and O5 parameters are gathered in half and gradients reduced in FP32. Batch norms and modules of
    `amp.keep_float`, which are FP32 at these levels, need units of their own:
    `fully_shard(norm, mp_policy=amp.fsdp_policy("O0"))`. The policies of the other levels cast nothing, as these levels
    cast elsewhere or not at all; at O3 call `model.half()` first.

    Args:
        opt_level: "O0" to "O5".
        root: True for the outermost call, whose outputs become FP32, like the outputs of the level.

    Returns a torch.distributed.fsdp.MixedPrecisionPolicy. Raises AmpStateError if there is no such level.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # here, as it takes a second

    policy = level_named(opt_level)
    if not policy.master_weights:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=policy.cast_model_type or None,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32 if root else None,
    )


def is_cast_by_fsdp2(model: nn.Module, policy: Policy) -> bool:
    """True if `fully_shard` is to cast `model` for `policy`; `check_shards` checks that it does."""
    return bool(policy.master_weights) and policy.cast_model_type in LOW_PRECISION and has_fsdp2(model)


def check_shards(model: nn.Module, policy: Policy, is_scaled: bool, gives_float32: bool, kept: Set[nn.Module]) -> None:
    """Raise AmpStateError if parameters of `model` are shards that `policy` cannot cast or train.

    Args:
        is_scaled: True if each rank would decide on overflows by itself.
        gives_float32: True if the outputs of the model become FP32.
        kept: the modules that stay FP32.
    """
    casts = policy.cast_model_type in LOW_PRECISION
    wrapper = fsdp1_in(model) or fsdp1_around(model) if casts or is_scaled else None
    if wrapper is not None:
        why = "cannot cast them" if casts else "would have each rank decide on an overflow of its own"
        raise AmpStateError(
            f"{type(wrapper).__name__} has made shards of the parameters of this model: {policy.opt_level} {why}.  "
            "Choose opt_level='O4', or 'O1' with process_group=torch.distributed.group.WORLD, or 'O0' and the "
            "wrapper's own MixedPrecision."
        )
    function_dtype = policy.patch_torch_functions_type
    if policy.patch_torch_functions and function_dtype is not None:
        for dtype in fsdp2_param_dtypes(model) & set(LOW_PRECISION) - {function_dtype}:
            level = "O4" if dtype is torch.bfloat16 else "O1"
            raise AmpStateError(
                f"{type(model).__name__} was sharded with MixedPrecisionPolicy(param_dtype={dtype}), and "
                f"{policy.opt_level} casts functions to {function_dtype}: weights would be rounded twice.  Choose "
                f"opt_level={level!r}, or call fully_shard(model) without param_dtype."
            )
    if is_cast_by_fsdp2(model, policy):
        _check_units(model, policy, gives_float32, kept)
    elif policy.cast_model_type:
        _check_dtypes(model, policy)


def _check_dtypes(model: nn.Module, policy: Policy) -> None:
    """Raise AmpStateError for a shard that would have to be cast, or to have a master."""
    for name, param in model.named_parameters():
        if is_sharded(param) and param.requires_grad and policy.master_weights and param.dtype in LOW_PRECISION:
            raise AmpStateError(
                f"Parameter {name} of {type(model).__name__} is a {type(param).__name__} in {param.dtype}, for which "
                f"{policy.opt_level} keeps no FP32 master: make it of FP32 weights, and choose opt_level='O4' or 'O1'."
            )
        if is_sharded(param) and param.dtype is not policy.cast_model_type:
            half_first = f"call model.to({policy.cast_model_type}) before fully_shard, or "
            raise AmpStateError(
                f"Parameter {name} of {type(model).__name__} is a {type(param).__name__}, which {policy.opt_level} "
                f"cannot cast: {half_first if has_fsdp2(model) else ''}choose opt_level='O4' or 'O1'."
            )


def _check_units(model: nn.Module, policy: Policy, gives_float32: bool, kept: Set[nn.Module]) -> None:
    """Raise AmpStateError unless each unit of `model` was sharded with the `mp_policy` of this level."""
    level, half = policy.opt_level, policy.cast_model_type

    def stays_float32(module: nn.Module) -> bool:
        return module in kept or isinstance(module, BatchNormBase) and bool(policy.keep_batchnorm_fp32)

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
        floats = [module for module in own if stays_float32(module)]
        called = f"model.{name}" if name else "model"
        is_float = theirs.param_dtype in (None, torch.float32)
        if floats and (len(floats) < len(own) or not is_float and not stays_float32(unit)):
            raise AmpStateError(
                f"{called} has a {type(floats[0]).__name__} in its unit of fully_shard, which {level} keeps in FP32.  "
                "Call fully_shard(module, mp_policy=amp.fsdp_policy('O0')) on each batch norm and each module of "
                "amp.keep_float before fully_shard of what is around it."
            )
        if floats:
            if not is_float:
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
    """Yield `unit` and the modules in it, except units inside of it and their modules."""
    yield unit
    for child in unit.children():
        if not is_fsdp2(child):
            yield from _own_modules(child)
