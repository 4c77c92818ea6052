"""A call of `initialize`, checked before anything is changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from amp_engine.ground.distributed import without_wrapper
from amp_engine.ground.dtypes import parse_dtype
from amp_engine.initialization import arguments
from amp_engine.initialization.cast_model import cast_targets
from amp_engine.kernels import CODES
from amp_engine.levels import levels, report
from amp_engine.levels.fsdp import is_cast_by_fsdp2
from amp_engine.levels.policy import Policy, Skips, check_casts, parse_skips, require
from amp_engine.optimizers import inner_of
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.half_weights import HalfWeights, half_weights


@dataclass(frozen=True)
class Request:
    """A call of `initialize` that can be done.

    Attributes:
        models: as a list, without DistributedDataParallel.
        optimizers: the optimizers that step, without wrappers.
        wrappers: each wrapper that was passed -> the optimizer inside.
        defaults: the level's own policy.
        policy: with the overrides of this call.
        left_alone: names of arguments of the models that are not cast; None: all of them.
        output_dtype: of floating model outputs; None: not given.
        process_group: the ranks that agree on overflows; None: not given.
        moment_dtype: of Adam's moments.
        casts_everywhere: True if functions are cast in the whole process, False: in forwards of the models.
        half_weights: the HalfWeights of each optimizer, or None if its low-precision weights are allowed.
        skips: the backwards under a static scale whose overflow skips the step.
        keeps_half: True if half gradients stay scaled until the step.
        releases: True if backwards step the parameters.
        on_host: True if masters are in the memory of the host.
        names: gives the names of the models' parameters, by id.
        judge: gives the HalfWeights of an optimizer, given the ids of parameters that get another type.
    """

    models: list[nn.Module]
    optimizers: list[Optimizer]
    wrappers: dict[Any, Optimizer]
    defaults: Policy
    policy: Policy
    left_alone: frozenset[str] | None
    output_dtype: torch.dtype | None
    process_group: ProcessGroup | None
    moment_dtype: torch.dtype
    casts_everywhere: bool
    half_weights: list[HalfWeights | None]
    skips: Skips
    keeps_half: bool
    releases: bool
    on_host: bool
    names: Callable[[], Mapping[int, str]]
    judge: Callable[[Optimizer, Container[int]], HalfWeights | None]

    def options(self) -> dict[str, str]:
        """Return the options about gradients, moments and memory that are not the defaults: keyword -> value."""
        moments = "8bit" if self.moment_dtype is CODES else str(self.moment_dtype)
        given = (
            ("moment_dtype", moments, self.moment_dtype is not torch.float32),
            ("gradients", "half", self.keeps_half),
            ("release_gradients", "True", self.releases),
            ("masters_on", "cpu", self.on_host),
        )
        return {name: value for name, value, is_given in given if is_given}

    def without_objects(self) -> Request:
        """The request of no model and no optimizer, which keeps none alive."""
        return replace(self, models=[], optimizers=[], wrappers={}, half_weights=[])

    def of_later(self, optimizer: Optimizer) -> Request:
        """The request for an optimizer that was made after the models were cast.

        Raises AmpStateError for one that cannot have what the level gives. Changes nothing.
        """
        _check_optimizers([optimizer], self.policy, self.skips, self.process_group, self.moment_dtype)
        arguments.check_release(self.releases, [optimizer], self.policy)
        arguments.check_on_host("cpu" if self.on_host else None, self.releases, [optimizer], self.policy)
        return replace(self, optimizers=[optimizer], half_weights=[self.judge(optimizer, ())])


def checked(
    models: Any,
    optimizers: Any,
    opt_level: str,
    given: Mapping[str, Any],
    skip_on_overflow: bool | str,
    hard_override: bool,
    process_group: Any,
    allow_half: bool,
) -> Request:
    """The arguments of `initialize` in their own types.

    Args:
        given: overrides of the level's properties, or None for no override; and `cast_inputs`, `cast_model_outputs`,
            `moment_dtype`, `min_loss_scale`, `max_loss_scale`, `casts`, `gradients`, `release_gradients`,
            `masters_on` of `initialize`.
        hard_override: print complaints about overrides that do not fit the level instead of raising them.
        allow_half: `_amp_state.allow_incoming_model_not_fp32`.

    Raises AmpStateError, AmpTypeError or AmpValueError. Changes nothing.
    """
    arguments.check_cudnn()
    check_casts(given["casts"])
    arguments.check_gradients(given["gradients"])
    defaults = levels.level(opt_level)
    policy = defaults.override(**{name: given[name] for name in _OF_LEVEL})
    if hard_override:
        for complaint in policy.complaints():
            report.complain(complaint, rank0=True)
    else:
        require(policy)
    outputs, moments = given["cast_model_outputs"], given["moment_dtype"]
    output_dtype = None if outputs is None else parse_dtype(outputs, "cast_model_outputs", True)
    model_list = arguments.as_models(models)
    left_alone = arguments.as_left_alone(given["cast_inputs"], model_list)
    passed = arguments.as_optimizers(optimizers)
    skips = parse_skips(skip_on_overflow, policy)
    arguments.check_process_group(process_group)
    may_disagree = _may_skip(policy, skips) and process_group is None
    gives_float32 = output_dtype in (None, torch.float32)
    unwrapped = [without_wrapper(model) for model in model_list]
    changed = _changed_by_a_cast(unwrapped, policy)
    arguments.check_models(model_list, policy, changed, may_disagree, gives_float32)
    model_list = unwrapped
    arguments.check_unwrapped(changed, policy)
    stepping = [inner_of(optimizer) for optimizer in passed]
    moments = arguments.as_moment_dtype(moments)
    _check_optimizers(stepping, policy, skips, process_group, moments)
    arguments.check_release(given["release_gradients"], stepping, policy)
    arguments.check_on_host(given["masters_on"], given["release_gradients"], stepping, policy)
    wrappers = {wrapper: inner for wrapper, inner in zip(passed, stepping, strict=True) if wrapper is not inner}
    arguments.check_wrappers(wrappers, bool(policy.master_weights))
    are_cast = {id(param) for param in changed}
    names = partial(_names, [weakref.ref(model) for model in model_list])
    judge = partial(half_weights, policy, allow_half or hard_override, names)
    halves = [judge(one, are_cast) for one in stepping]
    # Raises for bounds that the real scalers would refuse.
    LossScaler(policy.loss_scale, min_loss_scale=given["min_loss_scale"], max_loss_scale=given["max_loss_scale"])
    return Request(
        model_list,
        stepping,
        wrappers,
        defaults,
        policy,
        left_alone,
        output_dtype,
        process_group,
        moments,
        given["casts"] == "everywhere",
        halves,
        skips,
        given["gradients"] == "half",
        given["release_gradients"],
        given["masters_on"] is not None,
        names,
        judge,
    )


def _may_skip(policy: Policy, skips: Skips) -> bool:
    """True if ranks that cannot agree on a skip must be refused."""
    return policy.loss_scale != 1.0 or skips is Skips.ALWAYS


def _check_optimizers(
    optimizers: Sequence[Optimizer], policy: Policy, skips: Skips, process_group: Any, moments: torch.dtype
) -> None:
    agree = process_group is not None
    arguments.check_optimizers(optimizers, _may_skip(policy, skips), bool(policy.master_weights), agree)
    arguments.check_narrow(optimizers, policy, moments)


_OF_LEVEL = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")


def _names(refs: list[weakref.ref[nn.Module]]) -> dict[int, str]:
    """Id of each parameter -> its name, with its model's position if there are several models."""
    models = ((f"models[{i}]." if len(refs) > 1 else "", ref()) for i, ref in enumerate(refs))
    return {id(p): of + name for of, model in models if model is not None for name, p in model.named_parameters()}


def _changed_by_a_cast(models: list[nn.Module], policy: Policy) -> list[nn.Parameter]:
    if not policy.cast_model_type:
        return []
    cast = (model for model in models if not is_cast_by_fsdp2(model, policy))
    targets = (cast_targets(model, policy.cast_model_type, bool(policy.keep_batchnorm_fp32)) for model in cast)
    return [
        tensor
        for of_one in targets
        for tensor, dtype in of_one
        if isinstance(tensor, nn.Parameter) and tensor.dtype is not dtype
    ]
