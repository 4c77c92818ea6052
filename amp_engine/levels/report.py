"""The engine's messages: apex's lines word for word, and why steps are skipped."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch

from amp_engine.ground import messages
from amp_engine.ground.distributed import has_ranks
from amp_engine.ground.dtypes import dtype_name
from amp_engine.levels.levels import BRIEFS
from amp_engine.levels.policy import Policy

SCALE_LOSS_BEFORE_INITIALIZE = (  # apex's words
    "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  model, optimizer = "
    "amp.initialize(model, optimizer, opt_level=...) must be called before `with amp.scale_loss`."
)
EPS_IS_ZERO = (
    "Note:  {optimizer} steps float16 weights in float16 here, where eps={eps} is 0: a weight whose second moment is 0 "
    "is divided by 0.  Pass eps=1e-4, or use amp_engine.optimizers.FusedAdam, which computes in FP32."
)


def emulated_on_cpu(level: str, dtype: torch.dtype) -> str:
    """Message: the level computes on the CPU in a type for which the CPU has no instructions."""
    name = dtype_name(dtype)
    return f"Note:  {level} computes in {name}, which is slow on this CPU: 'python -m amp_engine info' says why."


def lost_values(
    level: str, dtype: torch.dtype, infinite: Sequence[str], zero: Sequence[str], whole: Sequence[str]
) -> Iterator[str]:
    """Messages: a cast makes values of these parameters or buffers infinite, 0 or other whole numbers."""
    info, name = torch.finfo(dtype), dtype_name(dtype)
    keep = "call amp.keep_float(module) on what has them before amp.initialize"
    wider = f"Take opt_level='O5', whose bfloat16 has the range, or {keep}"
    if infinite:
        largest = f"values beyond {info.max:.6g}, the largest {name}"
        yield f"Warning:  at {level} {largest}, become infinite, of {_some(infinite)}.  {wider}."
    if zero:
        smallest = f"values below {info.smallest_normal * info.eps:.2g}, the smallest {name}"
        yield f"Warning:  at {level} {smallest}, become 0, of {_some(zero)}.  {wider}."
    if whole:
        beyond = f"whole numbers beyond {2 / info.eps:.0f}, of which {name} has not all"
        yield f"Warning:  at {level} {beyond}, change, of {_some(whole)}.  {keep[0].upper()}{keep[1:]}."


def fp32_parts(
    came: torch.dtype | None, declared: Sequence[str], stay: Sequence[str], cast: Sequence[str]
) -> Iterator[str]:
    """Messages: what stays FP32 in a model that is cast, and what might have to.

    Args:
        came: the low-precision type that the model came in; None if it came in FP32.
        declared: names of modules, parameters and buffers that the model itself names.
        stay: names of other parameters and buffers that stay FP32.
        cast: names of buffers that half does not hold exactly, or that may be states that begin.
    """
    if declared:
        yield f"Note:  kept in FP32, as _keep_in_fp32_modules of the model says: {_some(declared)}."
    if stay and came is not None:
        yield f"Note:  the model came in {dtype_name(came)}, and what came in FP32 stays so: {_some(stay)}."
    if stay and came is None:
        yield f"Note:  modules with buffers and no parameters compute in FP32: {_some(stay)}."
    if cast:
        yield (
            f"Note:  buffers beside parameters are cast with them: {_some(cast)}.  For one that counts, averages "
            "or holds frequencies, list its name in model._keep_in_fp32_modules before amp.initialize."
        )


def missing_kernels(reason: str) -> str:
    """Message: no compiled kernels step this model; `reason` says why, and what adds them."""
    return f"Note:  optimizers take PyTorch's own steps, without the compiled kernels: {reason}"


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def still_casting(level: str, origin: str, dtype: torch.dtype) -> str:
    """Message: function casts are process-wide, so they reach a model that was initialized without them."""
    return (
        f"Warning:  {origin} goes on casting functions to {dtype_name(dtype)}, process-wide.  What is initialized now "
        f"({level}) computes in {dtype_name(dtype)} as well.  Call amp.close() before amp.initialize(...), or close() "
        "on the Engine that casts."
    )


def nothing_is_cast(level: str, calls: str, names: str) -> str:
    """Message: a function was registered to be cast, but this level casts the model instead."""
    return (
        f"Warning:  {calls} has no effect on {names} at {level}, which casts the model and no functions: it computes "
        "in the type of its arguments.  Where these are half, write x.float() in it, or keep the module that it is in "
        "by amp.keep_float(module) before initialize, or choose opt_level='O1' (bfloat16: 'O4')."
    )


def casts_replaced(origin: str, new: str, dtype: torch.dtype) -> str:
    """Message: function casts to another type replace those of earlier models."""
    return (
        f"Warning:  an engine casts functions to one type, so that earlier models ({origin}) compute in "
        f"{dtype_name(dtype)} from now on ({new}).  Call amp.close() before amp.initialize(...) if they are done, or "
        "initialize all of them at one level."
    )


class Reporter:
    """Passes the messages that `verbosity` allows to the logger `amp_engine`.

    Messages about casts are INFO, so that `verbosity=2` is enough to see them, without another logging level.

    Args:
        verbosity: 0 is silent, 1 is apex's default, 2 adds every cast, and messages of other ranks.
    """

    def __init__(self, verbosity: int = 1) -> None:
        self.verbosity = verbosity
        self._said: set[str] = set()

    def say_once(self, text: str) -> None:
        """Say `text` on the first of several ranks, and never again."""
        if text not in self._said and self.verbosity > 0:
            self._said.add(text)
            self.say(text, rank0=True)

    def say(self, text: str, rank0: bool = False, level: int | None = None, **fields: object) -> None:
        """Say `text`.

        Args:
            rank0: only on the first of several ranks.
            level: logging level; None: WARNING for texts that begin with "Warning:", as apex marked them, else INFO.
            fields: more attributes of the record.
        """
        if self.verbosity > 0 and not (rank0 and _rank() > 0):
            level_of_text = logging.WARNING if text.startswith("Warning:") else logging.INFO
            messages.say(text, level_of_text if level is None else level, stacklevel=2, **fields)

    def says(self, is_first: bool) -> bool:
        """True if this rank prints a message about an agreement of ranks; `is_first`: it is the first of them."""
        return is_first or self.verbosity > 1


def complain(text: str, rank0: bool = False) -> None:
    """Say a complaint that `hard_override` does not raise, as a warning at any verbosity; `rank0` as in `say`."""
    if not (rank0 and _rank() > 0):
        messages.say(f"Warning:  {text}", logging.WARNING, stacklevel=2)


def initialization(defaults: Policy, policy: Policy, options: Mapping[str, str], verbosity: int) -> Iterator[str]:
    """Yield the lines that `initialize` says about a level and the user's overrides; at a `verbosity` of 2 apex's.

    Args:
        options: keyword -> value of options that are no properties of a level, where they are not the default.
    """
    brief = f"Selected optimization level {BRIEFS[str(defaults.opt_level)]}"
    if verbosity > 1:
        yield brief
        yield "Defaults for this optimization level are:"
        yield from _lines(defaults.properties())
        yield "Processing user overrides (additional kwargs that are not None)..."
        yield "After processing overrides, optimization options are:"
        yield from _lines(policy.properties())
        yield from _lines(options)
        return
    yield brief.rstrip()
    before = defaults.properties()
    changed = {name: value for name, value in policy.properties().items() if value != before[name]}
    if overrides := [f"{name}={value}" for name, value in {**changed, **options}.items()]:
        yield f"Overrides:  {', '.join(overrides)}"


def steps(kind: str, masters: str, is_by_kernels: bool, is_released: bool, bytes_each: float) -> str:
    """Message: what steps what.

    Args:
        kind: the class of an optimizer.
        masters: such as "4 FP32 masters"; "" if it steps none.
        is_released: True if the backward steps.
        bytes_each: bytes of state a parameter, its weight too; 0.0 if they are not known.
    """
    on_masters = f" steps {masters}" if masters else " steps"
    by = "the compiled kernels" if is_by_kernels else "its own class"
    in_backward = ", in the backward, which frees each gradient" if is_released else ""
    in_bytes = f"  Weights and state take {bytes_each:.3g} bytes a parameter." if bytes_each else ""
    return f"{kind}{on_masters} by {by}{in_backward}.{in_bytes}"


def outside_of_models(kind: str, count: int) -> str:
    """Message: parameters with masters are in no model, so that no state_dict has their FP32 values."""
    return (
        f"Note:  {kind} steps {count} low-precision parameter{'s' * (count > 1)} of no model given to amp.initialize: "
        "a state_dict() with them is rounded.  Pass their module, too: amp.initialize([model, other], optimizer)."
    )


def no_optimizer(dtype: torch.dtype, is_rounded: bool) -> str:
    """Message: a level with masters was initialized without an optimizer.

    Args:
        is_rounded: True if the model came in another type than `dtype`.
    """
    rounded = ", which this call rounds: pass the optimizer to start from the FP32 values" if is_rounded else ""
    return (
        f"Note:  an optimizer that is made later gets FP32 masters at its first step, from the {dtype_name(dtype)} "
        f"parameters{rounded}."
    )


def later_optimizer(kind: str, masters: str, is_handed_over: bool, is_half: bool) -> Iterator[str]:
    """Messages: an optimizer that was made after `initialize` is looked after.

    Args:
        masters: such as "4 FP32 masters"; "" if it has none.
        is_handed_over: True if these start from values that an earlier optimizer or a checkpoint left.
        is_half: True if its state was low-precision.
    """
    start = "what an earlier optimizer or a checkpoint left" if is_handed_over else "the parameters"
    of_masters = f"  Its {masters} start from {start}." if masters else ""
    yield f"Note:  {kind}, which was made after amp.initialize, is looked after from here on.{of_masters}"
    if masters and is_half:
        yield (
            f"Warning:  the state of {kind} was in half when its masters were made: it was saved so, or torch rounded "
            f"it as it was loaded.  If it was saved in FP32, pass the {kind} to amp.initialize, then load it, to "
            "resume exactly."
        )


def flushed_message(loss_id: int, used: float, raised: float) -> str:
    """Message: a step was taken on gradients that were 0 because the scale was too low."""
    return (
        f"Warning:  after overflows all gradients were 0 at the loss scale {used} of loss scaler {loss_id}.  The step "
        f"was taken on them, and the scale is {raised} from now on."
    )


def released_message(name: str, count: int, steps: int, is_all: bool) -> str:
    """Message: released gradients were not finite, of `count` parameters, or of all, in the last of `steps` steps."""
    more = f" and of {count - 1} more" if count > 1 else ""
    others = "nothing was stepped" if is_all else "these parameters were not stepped, the others were"
    earlier = f"  So it was in {steps} steps." if steps > 1 else ""
    return f"Warning:  the gradient of {name}{more} was not finite: {others}.{earlier}"


def overflow_message(loss_id: int, loss_scale: float, dynamic: bool, is_lowered: bool) -> str:
    """Message: apex's line, which users grep for; a static scale, at which apex never skips, has its own."""
    if not dynamic:
        return f"Gradient overflow.  Skipping step, loss scaler {loss_id} is static at {loss_scale}"
    if not is_lowered:
        return f"Gradient overflow.  Skipping step, loss scaler {loss_id} keeps loss scale {loss_scale}"
    return f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {loss_scale}"


def static_overflow_message(loss_id: int, loss_scale: float) -> str:
    """Message, once for each scaler: a step was taken at a static scale in spite of an overflow."""
    return (
        f"Gradient overflow.  Loss scaler {loss_id} is static at {loss_scale}, so the step was taken with non-finite "
        "gradients.  Pass skip_on_overflow=True to amp.initialize to skip such steps, or loss_scale='dynamic'.  "
        "This is said once."
    )


def _lines(values: Mapping[str, object]) -> Iterator[str]:
    for name, value in values.items():
        yield f"{name:22} : {value}"


def _rank() -> int:
    return torch.distributed.get_rank() if has_ranks() else 0
