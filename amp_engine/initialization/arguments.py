"""Checks of the arguments of `initialize`, before anything is changed."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from amp_engine.casting.keep_float import kept_modules
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.ground.distributed import (
    has_other_ranks,
    is_in_zero,
    is_sharded,
    is_zero,
    steps_shards,
    without_wrapper,
    wrappers_around,
)
from amp_engine.ground.dtypes import LOW_PRECISION, cpu_lacks, is_low_precision, parse_dtype
from amp_engine.kernels import CODES, missing
from amp_engine.kernels.layout import address_of
from amp_engine.levels.fsdp import check_shards
from amp_engine.levels.policy import SPLIT, Policy
from amp_engine.levels.scale_rule import DynamicLossScale
from amp_engine.optimizers import LARC
from amp_engine.optimizers.base import FusedOptimizer
from amp_engine.optimizers.rules import own_rule_of, rule_of
from amp_engine.optimizers.wrapped import (
    inner_optimizers,
    parameters_elsewhere,
    refuse_around_masters,
    shares_groups,
    takes_hooks,
)

if TYPE_CHECKING:
    from amp_engine.tools.policy_file import RunPolicy

# `initialize` returns the objects that it takes.
Models = TypeVar("Models", bound=nn.Module | list[Any])
Optimizers = TypeVar("Optimizers", bound=Optimizer | LARC | list[Any])


class InitializeOptions(TypedDict, total=False):
    """The options of `initialize` after `opt_level`, for type checkers; its docstring explains them."""

    cast_model_type: torch.dtype | str | bool | None
    patch_torch_functions: bool | None
    keep_batchnorm_fp32: bool | str | None
    master_weights: bool | Literal["split", "24bit"] | None
    loss_scale: float | str | DynamicLossScale | None
    cast_model_outputs: torch.dtype | str | None
    num_losses: int
    verbosity: int
    min_loss_scale: float | None
    max_loss_scale: float
    skip_on_overflow: bool | Literal["auto"]
    allow_banned: bool
    adopt_data_writes: bool
    process_group: ProcessGroup | None
    moment_dtype: torch.dtype | str | None
    casts: Literal["everywhere", "model"]
    cast_inputs: bool | str | Sequence[str]
    gradients: Literal["float32", "half"]
    release_gradients: bool
    masters_on: Literal["cpu"] | None
    policy: str | os.PathLike[str] | RunPolicy | None


def as_list(optimizers: Any) -> list[Any]:
    """The optimizers of `scale_loss`, one or several, as a list."""
    if isinstance(optimizers, Optimizer) or not isinstance(optimizers, Iterable):
        return [optimizers]
    return list(optimizers)


def as_models(models: Any) -> list[nn.Module]:
    """`models` as a list of modules. Raises AmpTypeError for anything but one module or a list of them."""
    listed = [models] if isinstance(models, nn.Module) else models
    if not isinstance(listed, list) or not all(isinstance(m, nn.Module) for m in listed):
        raise AmpTypeError(
            "models must be either a single model or a list of models.  "
            f"It was {_described(models)}.  Call amp.initialize(model, optimizer) or amp.initialize([a, b], ...)."
        )
    return listed


def as_optimizers(optimizers: Any) -> list[Optimizer | LARC]:
    """`optimizers` as a list. Raises AmpTypeError for anything but None, one optimizer or a list of them."""
    if optimizers is None:
        return []
    listed = [optimizers] if isinstance(optimizers, (Optimizer, LARC)) else optimizers
    items = listed if isinstance(listed, list) else [listed]
    for item in items:
        if any(base.__name__ == "FP16_Optimizer" for base in type(item).__mro__):
            raise AmpStateError(
                f"An incoming optimizer is an instance of {type(item)}. The optimizer(s) passed to amp.initialize() "
                "must be bare \ninstances of either ordinary Pytorch optimizers, or Apex fused \noptimizers.\n"
            )
    if not isinstance(listed, list) or not all(isinstance(o, (Optimizer, LARC)) for o in listed):
        raise AmpTypeError(
            "optimizers must be either a single optimizer or a list of optimizers.  "
            f"It was {_described(optimizers)}.  Pass torch.optim.Optimizer objects, several of them as a list "
            "([a, b], not a tuple); a wrapper around an optimizer is made after amp.initialize."
        )
    return listed


def check_gradients(gradients: Any) -> None:
    """Raise AmpValueError unless `gradients` is "float32" or "half"."""
    if gradients not in ("float32", "half"):
        raise AmpValueError(f'gradients={gradients!r}, but it is "float32" (the default) or "half".')


def as_left_alone(cast_inputs: Any, models: Sequence[nn.Module]) -> frozenset[str] | None:
    """The names of arguments that are not cast; None: no argument is.

    Raises AmpTypeError for anything but True, False and names, AmpValueError for a name that no forward of `models`
    has.
    """
    if isinstance(cast_inputs, bool):
        return frozenset() if cast_inputs else None
    names = [cast_inputs] if isinstance(cast_inputs, str) else cast_inputs
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in names):
        raise AmpTypeError(
            f"cast_inputs={cast_inputs!r} is none of True, False, and names of arguments that are left alone.  Use for "
            'example cast_inputs=["timestep"].'
        )
    parameters = [p for model in models for p in _parameters_of(without_wrapper(model))]
    own = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    of_parts = {p.name for m in models for part in m.modules() for p in _parameters_of(part)}
    of_no_value = {p.name for p in parameters} - {*own}  # *args and **kwargs themselves
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in names:
        is_known = takes_more or name in of_parts or re.fullmatch(r"args\[\d+\]", name)
        if name in of_no_value or not is_known:
            near = get_close_matches(name, own, 1)
            raise AmpValueError(
                f"cast_inputs names {name!r}, which forward() of {', '.join(type(m).__name__ for m in models)} has not."
                f"  It has {', '.join(own) or 'args[0] and so on'}.{f'  Did you mean {near[0]!r}?' if near else ''}"
            )
    return frozenset(names)


def _parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    found: list[inspect.Parameter] = []
    with suppress(TypeError, ValueError):  # a forward that is compiled code
        found += inspect.signature(module.forward).parameters.values()
    return found


def check_models(
    models: Sequence[nn.Module], policy: Policy, changed: Sequence[nn.Parameter], is_scaled: bool, gives_float32: bool
) -> None:
    """Raise AmpStateError for a model that cannot be cast as `policy` says.

    Args:
        changed: the parameters whose type the cast changes.
        is_scaled: True if each rank with shards would decide on overflows by itself.
        gives_float32: True if outputs of models that are cast become FP32.
    """
    ids = set(map(id, changed))
    for model in models:
        is_wrapped = isinstance(model, DistributedDataParallel) and policy.cast_model_type in LOW_PRECISION
        if isinstance(model, nn.DataParallel) or (is_wrapped and any(id(p) in ids for p in model.parameters())):
            wrapper = type(model).__name__
            raise AmpStateError(
                f"Incoming model is an instance of {type(model)}. Parallel wrappers should only be applied to the "
                "model(s) AFTER \nthe model(s) have been returned from amp.initialize.  "
                f"{_initialize_call(policy)} first, then {wrapper}(model)."
            )
        kept = {part for module, _ in kept_modules(model) for part in module.modules()}
        check_shards(model, policy, is_scaled, gives_float32, kept)
        if not policy.cast_model_type:
            continue
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise AmpStateError(
                    f"{f'Module {name} of {type(model).__name__}' if name else 'The model'} was compiled by "
                    f"torch.jit.script or torch.jit.trace, and takes no hooks by which {policy.opt_level} casts it and "
                    "saves it in FP32.  Put the module that it was made from in its place, call amp.initialize, and "
                    "then torch.jit.trace(model, example_inputs)."
                )
        for name, param in model.named_parameters():
            if is_lazy(param):
                raise AmpStateError(
                    f"Parameter {name} of {type(model).__name__} has no shape yet (a lazy module).  Run one batch "
                    "through the model, then call amp.initialize."
                )
    if ids or policy.master_weights:
        _refuse_tied_by_data(models, policy, ids)


def _refuse_tied_by_data(models: Sequence[nn.Module], policy: Policy, changed: Set[int]) -> None:
    """Raise AmpStateError for two parameters in the same memory, where each would get memory or a master of its own.

    Args:
        changed: ids of the parameters whose type the cast changes.
    """

    def parts(param: nn.Parameter) -> bool:
        return id(param) in changed or (bool(policy.master_weights) and is_low_precision(param))

    found: dict[tuple[torch.device, int], tuple[nn.Parameter, str]] = {}
    for model in models:
        for name, param in model.named_parameters():
            if param.layout is not torch.strided or param.is_meta or is_sharded(param) or param.numel() == 0:
                continue
            known, place = f"{name} of {type(model).__name__}", (param.device, address_of(param))
            first, other = found.setdefault(place, (param, known))
            is_trained = first.requires_grad or param.requires_grad
            if first is not param and place[1] != 0 and is_trained and (parts(first) or parts(param)):
                raise AmpStateError(
                    f"Parameter {known} has the memory of {other}: tied by .data, they part at {policy.opt_level}.  "
                    "Make them one parameter, as in head.weight = embedding.weight, before you make the optimizer."
                )


def check_unwrapped(params: Sequence[nn.Parameter], policy: Policy) -> None:
    """Raise AmpStateError if a DistributedDataParallel reduces one of `params`, whose types a cast would change."""
    for wrapper in wrappers_around(params) if params else ():
        name = type(wrapper).__name__
        raise AmpStateError(
            f"{name} was made around this {type(wrapper.module).__name__} before amp.initialize, whose cast at "
            f"{policy.opt_level} takes away the hooks by which it reduces gradients: each rank would train alone.  "
            f"{_initialize_call(policy)} first, then {name}(model)."
        )


def _initialize_call(policy: Policy) -> str:
    return f"Call model, optimizer = amp.initialize(model, optimizer, opt_level={policy.opt_level!r})"


_MEANT = dict.fromkeys(("level", "dtype", "precision"), "opt_level")


def check_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise AmpTypeError for a keyword that `function` lacks; the message names the keyword that is meant."""
    names = list(known)
    for name in given:
        if name not in names:
            near = [_MEANT[name]] if name in _MEANT else get_close_matches(name, names, 1)
            meant = f"Write {near[0]}=... in its place." if near else f"It has {', '.join(names) or 'no keywords'}."
            raise AmpTypeError(f"{function}() got an unexpected keyword argument {name!r}.  {meant}")


def check_process_group(group: Any) -> None:
    """Raise AmpTypeError or AmpValueError for anything but None or a process group that this rank is in."""
    if group is None or (isinstance(group, ProcessGroup) and torch.distributed.get_rank(group) >= 0):
        return
    # new_group() gives a rank outside of the group an int.
    what = "a group that this rank is not in" if group == _NOT_A_MEMBER else _described(group)
    error = AmpValueError if group == _NOT_A_MEMBER else AmpTypeError
    raise error(
        f"process_group is {what}.  Pass a group of torch.distributed with this rank, for example "
        "torch.distributed.group.WORLD after init_process_group, or leave it out."
    )


def check_optimizers(
    optimizers: Sequence[Optimizer], is_scaled: bool, has_masters: bool = False, agree: bool = False
) -> None:
    """Raise AmpStateError for an optimizer that an engine cannot step.

    Args:
        is_scaled: True if an overflow may skip a step.
        has_masters: True if FP32 masters are made.
        agree: True if the user named the ranks that agree on an overflow.
    """
    for optimizer in optimizers:
        if not takes_hooks(optimizer):
            raise AmpStateError(
                f"{type(optimizer).__name__} is a torch.optim.Optimizer by name only: it takes no step hooks.  Pass "
                "the optimizer inside of it to amp.initialize, and make the wrapper afterwards."
            )
        if (is_scaled or has_masters) and _requires_closure(optimizer):
            raise AmpStateError(
                f"{type(optimizer).__name__}.step(closure) runs backwards of its own, which {_HOW[is_scaled]}.  Choose "
                "opt_level='O4' (bfloat16, without loss scaling) or 'O0', or an optimizer whose step() needs none."
            )
        if isinstance(optimizer, FusedOptimizer) and steps_shards(optimizer):
            raise AmpStateError(
                f"{type(optimizer).__name__} cannot step DTensors, as fully_shard and tensor parallelism make them.  "
                "Use an optimizer of torch.optim, such as torch.optim.AdamW."
            )
        entries = [p for group in optimizer.param_groups for p in group["params"]] if has_masters else []
        if frozen := [p for p in entries if not p.requires_grad and is_sharded(p) and is_low_precision(p)]:
            raise AmpStateError(
                f"{type(optimizer).__name__} has a frozen {type(frozen[0]).__name__} of shape "
                f"{tuple(frozen[0].shape)} in {frozen[0].dtype}, which gets no FP32 master, and its other parameters "
                "would get none beside it.  Give the optimizer only what it trains: [p for p in model.parameters() if "
                "p.requires_grad]."
            )
        if is_zero(optimizer) or (((is_scaled and not agree) or has_masters) and is_in_zero(optimizer)):
            raise AmpStateError(
                "Each rank steps other parameters by the .optim of a ZeroRedundancyOptimizer: it would decide on an "
                "overflow of its own, and others would never get what FP32 masters give the model.  Call "
                "amp.initialize(model, optimizer.optim, opt_level='O4'), or 'O0', or 'O1' with "
                "process_group=torch.distributed.group.WORLD, and amp.scale_loss(loss, optimizer.optim), and go on "
                "stepping the wrapper; do without it at O2 and O5."
            )
        for name, inner in inner_optimizers(optimizer).items():
            if has_masters:
                raise AmpStateError(
                    f"{type(optimizer).__name__} steps by its .{name} ({type(inner).__name__}), which FP32 masters "
                    f"would never reach.  Pass the {type(inner).__name__} alone to amp.initialize, or choose "
                    "opt_level='O4', where the parameters are FP32."
                )
            # In a list: of optimizers that step a part each.
            if "[" not in name and not shares_groups(optimizer, inner):
                raise AmpStateError(
                    f"{type(optimizer).__name__} steps the groups of its .{name} ({type(inner).__name__}), not "
                    f"its own.  Pass the {type(inner).__name__} to amp.initialize and wrap it afterwards, or do "
                    "without the wrapper."
                )
        place = parameters_elsewhere(optimizer, optimizer) if has_masters else None
        if place is not None:
            raise AmpStateError(
                f"{type(optimizer).__name__} keeps parameters in its .{place}, beside its groups, where FP32 masters "
                "would never replace them: its step would move nothing.  Have it take them from param_groups in each "
                "step, or choose opt_level='O1' or 'O4', where the parameters themselves are stepped."
            )


def as_moment_dtype(given: torch.dtype | str | None) -> torch.dtype:
    """Return the type in which moments are kept; uint8 for "8bit"."""
    if given is None:
        return torch.float32
    if given in ("8bit", CODES):
        return CODES
    try:
        return parse_dtype(given, "moment_dtype")
    except AmpTypeError:
        raise AmpTypeError(
            f'moment_dtype={given!r} is none of torch.float32, torch.bfloat16 and "8bit".  Use one of the three.'
        ) from None


def check_narrow(optimizers: Sequence[Optimizer], policy: Policy, moments: torch.dtype) -> None:
    """Raise AmpStateError or AmpValueError for split masters of shards, or moments that the kernels cannot keep."""
    if moments not in (torch.float32, torch.bfloat16, CODES):
        raise AmpValueError(
            f'moment_dtype={moments}, but moments are kept in torch.float32, torch.bfloat16 or "8bit"; float16 holds '
            "no second moments below 6e-8.  Use one of the three."
        )
    is_split, is_narrow = policy.master_weights in SPLIT, moments is not torch.float32
    asked = 'moment_dtype="8bit"' if moments is CODES else f"moment_dtype={moments}"
    for optimizer in optimizers:
        name, rule = type(optimizer).__name__, rule_of(optimizer)
        if (is_split or is_narrow) and steps_shards(optimizer):
            given = asked if is_narrow else f'master_weights="{policy.master_weights}"'
            raise AmpStateError(
                f"{given} was given with a {name} that steps DTensors, which torch steps by itself.  Leave it out: "
                "fully_shard divides masters and moments among ranks."
            )
        if not is_narrow:
            continue
        if rule is None or rule.formula not in ("adam", "sgd"):
            raise AmpStateError(
                f"{asked} was given with a {name}, but only torch.optim's Adam, AdamW and SGD, FusedAdam and FusedSGD "
                'keep narrow moments.  Use one of these, or leave it out: master_weights="split" and "24bit" take '
                "every optimizer."
            )
        if not all(map(rule.supports, optimizer.param_groups)):
            raise AmpStateError(
                f"{asked} was given with {name} as the kernels cannot step it: with amsgrad, differentiable, or betas "
                f"that are tensors.  Leave that out, or {asked}."
            )
        is_half = policy.cast_model_type in LOW_PRECISION and not policy.master_weights
        if is_half and not isinstance(optimizer, FusedOptimizer):
            raise AmpStateError(
                f"{asked} was given with a {name} at {policy.opt_level}, which has half weights without masters.  Use "
                "amp_engine.optimizers.FusedAdam, or opt_level='O2' or 'O5'."
            )
        for device in dict.fromkeys(p.device for group in optimizer.param_groups for p in group["params"]):
            if (reason := missing(device)) is not None:
                raise AmpStateError(f"{asked} needs compiled kernels, which alone step it: {reason}.  Or leave it out.")


def check_release(releases: Any, optimizers: Sequence[Optimizer], policy: Policy) -> None:
    """Raise unless backwards can step the parameters of these optimizers.

    Raises AmpTypeError, AmpValueError or AmpStateError.
    """
    if not isinstance(releases, bool):
        raise AmpTypeError(f"release_gradients={releases!r}, but it is True or False (the default).")
    if not releases:
        return
    if policy.loss_scale != 1.0:
        raise AmpValueError(
            f"release_gradients=True was given with loss_scale={policy.loss_scale!r}, but a step in the backward "
            "cannot wait for the check of all gradients that a loss scale needs.  Choose opt_level='O5', or "
            "loss_scale=1.0."
        )
    if has_other_ranks():
        raise AmpStateError(
            "release_gradients=True was given with several ranks, whose gradients are complete only after the "
            "backward.  Leave it out."
        )
    for optimizer in optimizers:
        is_half = policy.cast_model_type in LOW_PRECISION and not policy.master_weights
        if is_half and not isinstance(optimizer, FusedOptimizer):
            name = type(optimizer).__name__
            raise AmpStateError(
                f"release_gradients=True was given with {name} at {policy.opt_level}, which has half weights without "
                "masters.  Use amp_engine.optimizers.FusedAdam, or masters at opt_level='O5'."
            )
    devices = (p.device for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    _check_stepped_apart("release_gradients=True", optimizers, devices)


def check_on_host(masters_on: Any, releases: bool, optimizers: Sequence[Optimizer], policy: Policy) -> None:
    """Raise AmpTypeError, AmpValueError or AmpStateError unless the CPU can step masters of these optimizers."""
    if masters_on is None:
        return
    asked = f"masters_on={masters_on!r}"
    if not isinstance(masters_on, (str, torch.device)):
        raise AmpTypeError(f'{asked}, but it is "cpu" or None (the default: the device of the model).')
    if str(masters_on) != "cpu":
        raise AmpValueError(f'{asked}, but it is "cpu" or None (the default: the device of the model).')
    if policy.master_weights is not True:
        raise AmpValueError(
            f"{asked} was given at {policy.opt_level} with master_weights={policy.master_weights!r}, but moves FP32 "
            "masters.  Choose opt_level='O5' and master_weights=True; moment_dtype makes moments smaller."
        )
    if policy.loss_scale != 1.0:
        raise AmpValueError(
            f"{asked} was given with loss_scale={policy.loss_scale!r}, but half gradients travel, which hold no "
            "unscaled values of float16.  Choose opt_level='O5', or loss_scale=1.0."
        )
    if releases:
        raise AmpValueError(f"{asked} was given with release_gradients=True.  Choose one of the two.")
    for optimizer in optimizers:
        if steps_shards(optimizer):
            raise AmpStateError(
                f"{asked} was given with a {type(optimizer).__name__} that steps DTensors.  Leave it out: fully_shard "
                "divides masters among ranks, and its CPUOffloadPolicy moves them."
            )
    _check_stepped_apart(asked, optimizers, [torch.device("cpu")])


def _check_stepped_apart(asked: str, optimizers: Sequence[Optimizer], devices: Iterable[torch.device]) -> None:
    """Raise AmpStateError unless the kernels can step parameters of these optimizers one by one on `devices`."""
    for optimizer in optimizers:
        name, rule = type(optimizer).__name__, rule_of(optimizer)
        if rule is None or rule.formula == "lamb" or not all(map(rule.supports, optimizer.param_groups)):
            why = "cannot step parameters one by one" + " as it is set" * (rule is not None and rule.formula != "lamb")
            if rule is None and own_rule_of(optimizer) is not None:
                why = "has a step() of its own, and kernels that step parameters one by one would pass it by"
            raise AmpStateError(
                f"{asked} was given with {name}, which {why}.  Use "
                "torch.optim's AdamW, Adam (without amsgrad) or SGD, or a fused optimizer other than LAMB."
            )
    for device in dict.fromkeys(devices) if optimizers else ():
        if (reason := missing(device)) is not None:
            raise AmpStateError(f"{asked} needs compiled kernels, which alone step so: {reason}.  Or leave it out.")


def missing_kernels(models: Sequence[nn.Module]) -> Iterator[str]:
    """Say why there are no compiled kernels for a type of device that these models are on, and what adds them."""
    types = dict.fromkeys(p.device.type for model in models for p in model.parameters())
    found = (missing(torch.device(kind)) for kind in types if kind in ("cpu", "cuda"))
    yield from dict.fromkeys(reason for reason in found if reason is not None)


ZERO_IN_FLOAT16 = 2.0**-25  # half of float16's smallest number: a tie, which rounds to even, so to 0
_HOW = {
    True: "would come after the decision to skip a step that overflowed",
    False: "would never reach the FP32 masters that it steps",
}


def _requires_closure(optimizer: Optimizer) -> bool:
    """True if `step` cannot be called without a closure, like LBFGS.step."""
    try:
        parameters = inspect.signature(optimizer.step).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    return any("closure" in p.name and p.default is p.empty and p.kind not in _COLLECTING for p in parameters)


_NOT_A_MEMBER = getattr(torch.distributed, "GroupMember", None) and torch.distributed.GroupMember.NON_GROUP_MEMBER
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_wrappers(wrappers: Mapping[Any, Optimizer], has_masters: bool) -> None:
    """Raise AmpStateError for a wrapper of an optimizer that an engine cannot step."""
    for wrapper, inner in wrappers.items():
        if isinstance(wrapper, LARC) and steps_shards(inner):
            raise AmpStateError(
                f"LARC goes by the norm of each parameter, of which a rank has a shard.  Pass the "
                f"{type(inner).__name__} inside of it."
            )
        if has_masters:
            refuse_around_masters(wrapper, inner)


def check_loss(loss: Any, function: str, use: str) -> None:
    """Raise AmpTypeError unless `loss` is a tensor; the message names `function` and `use`."""
    if not isinstance(loss, Tensor):
        raise AmpTypeError(
            f"{function}() takes the loss as a tensor, not a {type(loss).__name__}.  Pass what {use} would be "
            "called on."
        )


def as_parameters(given: Any) -> list[Tensor] | None:
    """`given`, one tensor or an iterable of tensors, as a list; None for anything else, such as an optimizer."""
    if isinstance(given, Tensor):
        return [given]
    if hasattr(given, "param_groups") or isinstance(given, nn.Module) or not isinstance(given, Iterable):
        return None
    listed = list(given)
    return listed if all(isinstance(one, Tensor) for one in listed) else None


def check_has_groups(optimizer: Any, function: str, others: str) -> None:
    """Raise AmpTypeError for anything but an optimizer, such as a model."""
    if not hasattr(optimizer, "param_groups"):
        raise AmpTypeError(
            f"{function}() takes the optimizer, not a {type(optimizer).__name__}.  Call amp.{function}(optimizer"
            f"{others}), which finds what it steps."
        )


def check_num_losses(num_losses: Any) -> None:
    """Raise AmpValueError for anything but a positive int."""
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise AmpValueError(
            f"num_losses={num_losses!r} is not a positive whole number.  Use num_losses=1, or as many as there are "
            "losses with a loss_id of their own."
        )


def check_cudnn() -> None:
    """Raise AmpStateError if cuDNN is switched off, as apex did; it is on by default, also without CUDA."""
    if not torch.backends.cudnn.enabled:
        raise AmpStateError(
            "Amp requires torch.backends.cudnn.enabled = True.  Set torch.backends.cudnn.enabled = True before "
            "amp.initialize."
        )


def emulated_on_cpu(models: Sequence[nn.Module], policy: Policy) -> torch.dtype | None:
    """The type in which `policy` runs products or convolutions of `models` on this CPU, if the CPU emulates it."""
    dtype = policy.low_precision
    if dtype is None or cpu_lacks(dtype) is None:
        return None
    parameters = (parameter for model in models for parameter in model.parameters())
    weights = (parameter for parameter in parameters if not is_lazy(parameter) and parameter.dim() > 1)
    return dtype if any(weight.device.type == "cpu" and weight.is_floating_point() for weight in weights) else None


def zero_eps(optimizers: Sequence[Optimizer], policy: Policy) -> tuple[str, float] | None:
    """(class, eps) of the first optimizer whose `eps` rounds to 0 in its float16 arithmetic; None without one."""
    if policy.master_weights:
        return None
    for optimizer in optimizers:
        if isinstance(optimizer, FusedOptimizer):
            continue  # computes in FP32
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if (
                isinstance(eps, float)
                and 0 < eps <= ZERO_IN_FLOAT16
                and not group.get("fused")  # torch's fused kernels compute in FP32
                and any(p.dtype is torch.float16 and p.requires_grad for p in group["params"])
            ):
                return type(optimizer).__name__, eps
    return None


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        inside = ", ".join(type(v).__name__ for v in value)
        return f"a {type(value).__name__} of ({inside})"
    return f"a {type(value).__name__}"
