"""Refuses, in apex's words, or warns of low-precision weights that the level does not have."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from amp_engine.errors import AmpStateError, AmpWarning
from amp_engine.ground.callers import warn
from amp_engine.ground.distributed import is_sharded
from amp_engine.ground.dtypes import LOW_PRECISION, dtype_name, is_low_precision
from amp_engine.levels.policy import Policy
from amp_engine.stepping.exact import exact_of

_TENSORS = {torch.float16: "HalfTensor", torch.bfloat16: "BFloat16Tensor"}
_LEVELS = {torch.float16: "O2", torch.bfloat16: "O5"}
_LOST = {
    torch.bfloat16: "A step of 1e-5 leaves most bfloat16 weights where they were.",
    torch.float16: "A step of 1e-5 leaves most float16 weights where they were, and an eps of 1e-8 is 0 in float16.",
}


class HalfWeights:
    """Refuses the low-precision weights of one optimizer, or lets them through with one warning.

    Args:
        policy: a policy of FP32 weights.
        is_let_through: True if `_amp_state.allow_incoming_model_not_fp32` or `hard_override` was set.
        names: gives the names of the models' parameters, by id.
    """

    def __init__(self, policy: Policy, is_let_through: bool, names: Callable[[], Mapping[int, str]]) -> None:
        self._policy, self._is_let_through, self._names = policy, is_let_through, names
        self._found: list[nn.Parameter] = []
        self._known: set[int] = set()  # ids of weights that were let through

    def look_at(self, params: Iterable[nn.Parameter], are_cast: Container[int] = ()) -> None:
        """Note which of `params` are low-precision. Loops over all of them.

        Args:
            are_cast: ids of parameters that `initialize` gives another type; they are not noted.
        """
        self._found = [p for p in params if is_low_precision(p) and id(p) not in are_cast]

    def judge(self, optimizer: Optimizer) -> None:
        """Raise AmpStateError if `optimizer` would step a noted parameter, or warn of it once if it is let through."""
        if not self._found:
            return
        # Noted parameters may be frozen, or FP32 by now.
        found = [p for p in self._found if p.requires_grad and is_low_precision(p) and id(p) not in self._known]
        if not found:
            return
        first = found[0]
        name, dtype = self._names().get(id(first)) or _place(optimizer, first), dtype_name(first.dtype)
        others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        level = _LEVELS[first.dtype]
        to_type = (
            f"Pass opt_level={level!r} (half weights with FP32 masters) or master_weights=True (FP32 masters of these "
            "parameters alone) to amp.initialize, or call model.float() before the optimizer is made."
        )
        if is_sharded(first):  # a DTensor gets no master
            to_type = "Call model.float() before fully_shard."
        if self._is_let_through:
            self._known.update(map(id, found))
            warn(
                f"{type(optimizer).__name__} steps {name}{others} in {dtype}, without a FP32 master, as "
                "allow_incoming_model_not_fp32 or hard_override of _amp_state asks: an update that is small beside its "
                f"weight is lost.  {_LOST[first.dtype]}  {to_type}",
                AmpWarning,
            )
            return
        where = "torch" if first.device.type == "cpu" else f"torch.{first.device.type}"
        raise AmpStateError(
            f"Found param {name} with type {where}.{_TENSORS[first.dtype]}, expected {where}.FloatTensor.\nWhen using "
            "amp.initialize, you do not need to call .half() on your model\nbefore passing it, no matter what "
            f"optimization level you choose.  {self._policy.opt_level} would step {name}{others} in {dtype}, where an "
            f"update that is small beside its weight is lost.  {to_type}"
        )


def half_weights(
    policy: Policy,
    is_let_through: bool,
    names: Callable[[], Mapping[int, str]],
    optimizer: Optimizer,
    are_cast: Container[int],
) -> HalfWeights | None:
    """Judge the low-precision weights of `optimizer`, and return their HalfWeights; None if they are allowed.

    Raises AmpStateError. Changes nothing.
    """
    is_float32 = policy.cast_model_type is torch.float32 or (
        policy.patch_torch_functions_type is not None and policy.cast_model_type not in LOW_PRECISION
    )
    if not is_float32:
        return None
    found = HalfWeights(policy, is_let_through, names)
    params = (p for group in optimizer.param_groups for p in group["params"])
    found.look_at((p for p in params if not policy.master_weights or is_sharded(p)), are_cast)  # those without masters
    found.judge(optimizer)
    return found


def warn_of_converted(policy: Policy, optimizer: Optimizer) -> None:
    """Warn of parameters in the half type that is not the level's: the model was converted after `initialize`."""
    level = policy.cast_model_type
    stepped = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    other = next((p.dtype for p in stepped if is_low_precision(p) and p.dtype is not level), None)
    if level in LOW_PRECISION and other is not None:
        call, option = ("half", "16-true") if other is torch.float16 else ("bfloat16", "bf16-true")
        warn(
            f"{type(optimizer).__name__} steps parameters in {dtype_name(other)}, which {policy.opt_level} had in "
            f"{dtype_name(level)}: the model was converted after amp.initialize, and computes in {dtype_name(other)}.  "
            f"Take model.{call}() out, or a trainer's option for it, such as precision={option!r}.  This is said once.",
            AmpWarning,
        )


_COPIED = WeakIdKeyDictionary()  # has the parameters of copies of models that were cast


def note_copy(model: nn.Module) -> None:
    """Note that `model` is a copy of one that was cast: no level is its own."""
    for param in model.parameters():
        _COPIED[param] = None


def warn_of_copy(optimizer: Optimizer) -> None:
    """Warn if an optimizer steps low-precision parameters of the copy of a model, which has no masters."""
    stepped = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    found = [p for p in stepped if p in _COPIED and is_low_precision(p) and next(exact_of(p), None) is None]
    if found:
        kind, dtype = type(optimizer).__name__, found[0].dtype
        warn(
            f"{kind} steps {len(found)} parameters in {dtype_name(dtype)}, without FP32 masters, of a copy of an "
            f"initialized model: an update that is small beside its weight is lost.  {_LOST[dtype]}  Call "
            f"amp.initialize(copy, optimizer, opt_level={_LEVELS[dtype]!r}).",
            AmpWarning,
        )


def _place(optimizer: Optimizer, param: nn.Parameter) -> str:
    places = ((i, j, p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"]))
    i, j = next((i, j) for i, j, p in places if p is param)
    return f"{j} of group {i} of {type(optimizer).__name__}"
