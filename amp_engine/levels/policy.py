"""The types and casts of a run as one frozen value, which checks every combination."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch

from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.ground.dtypes import LOW_PRECISION, dtype_name, parse_dtype
from amp_engine.levels.scale_rule import DynamicLossScale

SPLIT = ("split", "24bit")
"""Values of `master_weights` with which a bfloat16 parameter is a part of its master."""

# Scales and their inverses are float32 on the device: the smallest normal number, and one over it.
LOWEST_SCALE = torch.finfo(torch.float32).tiny
HIGHEST_SCALE = 1.0 / LOWEST_SCALE

LossScale = float | Literal["dynamic", "auto"] | DynamicLossScale

_FUNCTION_CASTING_LEVELS = ("O1", "O4")


@dataclass(frozen=True)
class Policy:
    """The properties of an optimization level after the user's overrides.

    Fields (apex's names and order, which is also the order in which they are printed):
        enabled: False makes every other field void.
        opt_level: "O0" to "O5".
        cast_model_type: type of the model's parameters, buffers and inputs. None or False: not cast.
        patch_torch_functions: cast the arguments of listed torch functions (O1, O4).
        keep_batchnorm_fp32: leave affine batch norms in float32 when the model is cast.
        master_weights: the optimizer steps float32 copies of low-precision parameters; "split": bfloat16 parameters
            with their remainders.
        loss_scale: "dynamic", a DynamicLossScale, "auto", or the static factor.
        patch_torch_functions_type: the low-precision type of `patch_torch_functions`; None elsewhere.
    """

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | Literal[False] | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | Literal["split", "24bit"] | None = None
    loss_scale: LossScale = 1.0
    patch_torch_functions_type: torch.dtype | None = None

    @property
    def low_precision(self) -> torch.dtype | None:
        """The half type to which functions or models are cast; None if they compute in float32."""
        of_functions = self.patch_torch_functions_type if self.patch_torch_functions else None
        return next((t for t in (of_functions, self.cast_model_type) if t in LOW_PRECISION), None)

    def override(self, **overrides: object) -> Policy:
        """Return a copy with every override that is not None.

        Raises AmpTypeError or AmpValueError for a value that no policy can hold. `complaints` checks if fields fit each
        other.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        if "cast_model_type" in given and given["cast_model_type"] is not False:
            given["cast_model_type"] = parse_dtype(given["cast_model_type"], "cast_model_type")
        if "keep_batchnorm_fp32" in given and self.opt_level not in _FUNCTION_CASTING_LEVELS:
            given["keep_batchnorm_fp32"] = _parse_bool(given["keep_batchnorm_fp32"], "keep_batchnorm_fp32")
        if isinstance(given.get("master_weights"), str) and given["master_weights"] not in SPLIT:
            raise AmpValueError(
                f'master_weights={given["master_weights"]!r} is none of True, False, "split" and "24bit".  Use one of '
                "them."
            )
        if "loss_scale" in given:
            given["loss_scale"] = parse_loss_scale(given["loss_scale"])
        return dataclasses.replace(self, **given)  # type: ignore[arg-type]

    def with_property(self, name: str, value: object) -> Policy:
        """Return a copy with one of apex's properties set, also to None.

        Raises AmpStateError if there is no such property or its value does not fit the others, AmpTypeError or
        AmpValueError for a value that it cannot have.
        """
        if name not in self.properties():
            raise AmpStateError(f"There is no property {name!r}.  Use one of {', '.join(self.properties())}.")
        changed = self.override(**{name: value})
        if value is None:
            changed = dataclasses.replace(self, **{name: None})  # type: ignore[arg-type]
        require(changed)
        return changed

    def complaints(self) -> Iterator[str]:
        """Yield a sentence for each field that does not fit the level (apex's words)."""
        level = self.opt_level
        casts_functions = level in _FUNCTION_CASTING_LEVELS
        if casts_functions and self.cast_model_type not in (None, False, torch.float32):
            yield (
                f"{level} inserts casts around Torch functions rather than model weights, so with {level}, "
                "the model weights themselves should remain FP32. If you wish to cast the model to a "
                "different type, use opt_level='O2' or 'O3'. "
                f"cast_model_type was {self.cast_model_type}"
            )
        if self.patch_torch_functions and not casts_functions:
            yield (
                "Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'.  For casts to "
                "bfloat16 select opt_level='O4'."
            )
        if casts_functions and self.keep_batchnorm_fp32 is not None:
            yield (
                f"With opt_level {level}, batchnorm functions are automatically patched to run in FP32, so "
                f"keep_batchnorm_fp32 should be None. keep_batchnorm_fp32 was {self.keep_batchnorm_fp32}"
            )
        if self.master_weights in SPLIT and not casts_functions and self.cast_model_type is not torch.bfloat16:
            yield (
                f'master_weights="{self.master_weights}" was given with {level}, whose model is '
                f"{_in_words(self.cast_model_type)}: a bfloat16 parameter and 16 bits make up a float32, with 8 bits "
                "one of 24 bits, a float16 one has too short an exponent for it, and "
                'float32 has nothing to split.  Use opt_level="O5" with it.'
            )
        if casts_functions and self.master_weights not in (None, True):
            yield (
                f"It doesn't make sense to use master_weights with {level}. With {level}, your model weights "
                "themselves should be FP32.  For a model that arrives in half use master_weights=True."
            )

    def properties(self) -> dict[str, object]:
        """Return apex's seven properties and their values, in print order."""
        names = [f.name for f in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if name != "patch_torch_functions_type"}


def parse_loss_scale(value: object) -> LossScale:
    """Return `value` as a loss scale: "dynamic", "auto", a DynamicLossScale, or a positive finite number.

    Takes strings such as "128.0" too. Raises AmpValueError for anything else.
    """
    if value == "dynamic" or value == "auto":
        return value
    if isinstance(value, str) and (parsed := DynamicLossScale.parse(value)) is not None:
        return parsed
    if isinstance(value, DynamicLossScale):
        return value
    try:
        scale = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        scale = math.nan
    if not LOWEST_SCALE <= scale <= HIGHEST_SCALE:
        raise AmpValueError(
            f'loss_scale={value!r} is neither "dynamic", "auto", a DynamicLossScale nor a positive finite number (that '
            f"float32 holds, and its inverse: {LOWEST_SCALE} to {HIGHEST_SCALE}).  "
            'Use loss_scale="dynamic", or a number such as loss_scale=128.0.'
        )
    return scale


def check_casts(casts: object) -> None:
    """Raise AmpValueError unless `casts` is "everywhere" or "model"."""
    if casts not in ("everywhere", "model"):
        raise AmpValueError(
            f'casts={casts!r} is neither "everywhere" nor "model".  Use casts="model" to cast functions inside of '
            "forwards of the models alone, or leave it out."
        )


class Skips(Enum):
    """The steps at a static scale that are skipped where gradients are not finite."""

    NEVER = False
    BY_DEFAULT = "auto"  # all but those with a closure, and those of ranks that cannot agree
    ALWAYS = True


def parse_skips(skip_on_overflow: object, policy: Policy) -> Skips:
    """Return the steps that `skip_on_overflow` of `initialize` means. Raises AmpValueError for another string."""
    if skip_on_overflow == "auto":
        is_bfloat16 = torch.bfloat16 in (policy.patch_torch_functions_type, policy.cast_model_type)
        return Skips.BY_DEFAULT if is_bfloat16 else Skips.NEVER
    if isinstance(skip_on_overflow, str):
        raise AmpValueError(
            f'skip_on_overflow={skip_on_overflow!r} is none of True, False and "auto".  Use one of them.'
        )
    return Skips.ALWAYS if skip_on_overflow else Skips.NEVER


def require(policy: Policy) -> None:
    """Raise AmpStateError with the first complaint about `policy`, if there is one."""
    for complaint in policy.complaints():
        raise AmpStateError(complaint)


def _parse_bool(value: object, argument: str) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("True", "False"):
        return value == "True"
    # apex raised AssertionError here, and scripts that probe for it exist.
    raise AssertionError(f"{argument} must be a boolean, or the string 'True' or 'False'.  {argument} was {value!r}")


def _in_words(cast_model_type: torch.dtype | Literal[False] | None) -> str:
    return dtype_name(cast_model_type) if cast_model_type else "not cast"
