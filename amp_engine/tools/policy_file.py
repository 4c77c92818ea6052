"""A level, the modules that stay in FP32 at it, and other arguments of `initialize`, in a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch

from amp_engine.errors import AmpError, AmpTypeError, AmpValueError
from amp_engine.ground.dtypes import dtype_name, parse_dtype
from amp_engine.initialization.arguments import as_moment_dtype
from amp_engine.levels import levels
from amp_engine.levels.policy import check_casts, parse_loss_scale
from amp_engine.levels.scale_rule import DynamicLossScale

FORMAT = 1
DEFAULT_LEVEL = "O1"
"""The level of `initialize` if none is given."""

_DTYPES = ("cast_model_type", "cast_model_outputs")


@dataclass(frozen=True)
class RunPolicy:
    """The arguments of a run: a level, the modules that stay in FP32 at it, and overrides of the level.

        amp.RunPolicy("O2", keep_float=("encoder.norm",), loss_scale=128.0).save("policy.json")
        model, optimizer = amp.initialize(model, optimizer, policy="policy.json")

    The file is JSON, with `"format": 1` and each attribute that is set:

        {"format": 1, "opt_level": "O2", "keep_float": ["encoder.norm"], "loss_scale": 128.0}

    Attributes:
        opt_level: "O0" to "O5".
        keep_float: names of modules, as `model.named_modules()` gives them, "" for the model itself; with several
            models `models[0].encoder.norm`. `initialize` passes the modules to `amp.keep_float` before it casts the
            model. At O0 they change nothing.

    The other attributes are the arguments of `initialize` of the same names; None: not set. Types and rules are kept as
    strings, as in the file: "float16", and a DynamicLossScale as `str` writes it, "dynamic(growth_interval=500)".

    Raises AmpValueError for an unknown level, for values that the level does not allow and for values of other types.
    """

    opt_level: str
    keep_float: Sequence[str] = ()
    cast_model_type: torch.dtype | str | Literal[False] | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | Literal["split", "24bit"] | None = None
    loss_scale: float | str | DynamicLossScale | None = None
    cast_model_outputs: torch.dtype | str | None = None
    min_loss_scale: float | None = None
    max_loss_scale: float | None = None
    moment_dtype: torch.dtype | str | None = None
    casts: Literal["everywhere", "model"] | None = None
    cast_inputs: bool | str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        plain = object.__setattr__
        for name in ("keep_float", "cast_inputs"):
            if isinstance(getattr(self, name), list):
                plain(self, name, tuple(getattr(self, name)))
        if isinstance(self.loss_scale, DynamicLossScale):
            plain(self, "loss_scale", str(self.loss_scale))
        for name in (*_DTYPES, "moment_dtype"):
            if isinstance(getattr(self, name), torch.dtype):
                plain(self, name, dtype_name(getattr(self, name)))
        self._check()

    @property
    def overrides(self) -> dict[str, Any]:
        """The arguments of `initialize` that are set, except for the level and the modules."""
        found = {name: getattr(self, name) for name in _OVERRIDES}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_json(cls, text: str, source: str = "This text") -> RunPolicy:
        """Return the policy in a text that `to_json` or a user wrote.

        Args:
            text: JSON.
            source: name of the text in errors.

        Raises AmpValueError for other texts, and for unknown keys, with the nearest known one.
        """
        try:
            found = json.loads(text)
        except ValueError as e:
            raise AmpValueError(f"{source} is no JSON ({e}).  {_EXAMPLE}") from e
        if not isinstance(found, dict):
            raise AmpValueError(f"{source} holds no object.  {_EXAMPLE}")
        written = found.pop("format", None)
        if written != FORMAT or isinstance(written, bool):
            raise AmpValueError(
                f'{source} does not say "format": {FORMAT}, the one that this version reads.  {_EXAMPLE}'
            )
        names = [f.name for f in dataclasses.fields(cls)]
        for key in found:
            if key not in names:
                near = get_close_matches(key, names, 1)
                meant = f"  Did you mean {near[0]!r}?" if near else ""
                raise AmpValueError(f"{source} has the key {key!r}, which is none of {', '.join(names)}.{meant}")
        if "opt_level" not in found:
            raise AmpValueError(f"{source} has no opt_level.  {_EXAMPLE}")
        try:
            return cls(**found)
        except AmpError as e:
            raise AmpValueError(f"{source}: {e}") from e

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunPolicy:
        """Return the policy in a file. Raises AmpValueError if the file has none, OSError like `open`."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"), os.fspath(path))

    def to_json(self) -> str:
        """Return `{"format": 1, "opt_level": ..., "keep_float": [...], ...}` with the other attributes that are set."""
        return json.dumps(
            {"format": FORMAT, "opt_level": self.opt_level, "keep_float": [*self.keep_float], **self.overrides},
            indent=2,
            allow_nan=False,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a file. Raises OSError like `open`."""
        Path(path).write_text(f"{self.to_json()}\n", encoding="utf-8")

    def __str__(self) -> str:
        kept = ", ".join(name or "the model itself" for name in self.keep_float) or "no module"
        others = "".join(f", {name}={value!r}" for name, value in self.overrides.items())
        return f"{self.opt_level}{others}, with {kept} kept in FP32"

    def _check(self) -> None:
        """Raise AmpValueError for values of a wrong type, or that do not fit the level."""
        for name, (allowed, in_words) in _TYPES.items():
            value = getattr(self, name)
            if value is not None and not (type(value) in allowed and (name != "cast_model_type" or value is not True)):
                raise AmpValueError(f"{name} is {value!r}, and has to be {in_words}.")
        if not isinstance(self.keep_float, tuple) or not all(isinstance(name, str) for name in self.keep_float):
            raise AmpValueError(
                f"keep_float is {self.keep_float!r}, and has to be a list of names of modules, such as "
                '["encoder.norm"].'
            )
        if isinstance(self.cast_inputs, tuple) and not all(isinstance(name, str) for name in self.cast_inputs):
            raise AmpValueError(f"cast_inputs is {self.cast_inputs!r}, and has to be {_TYPES['cast_inputs'][1]}.")
        if self.opt_level not in levels.LEVELS:
            raise AmpValueError(f"opt_level is {self.opt_level!r}, and has to be one of {', '.join(levels.LEVELS)}.")
        try:
            for name in _DTYPES:
                if getattr(self, name):
                    parse_dtype(getattr(self, name), name, allow_float64=name == "cast_model_outputs")
            as_moment_dtype(self.moment_dtype)
            if self.casts is not None:
                check_casts(self.casts)
            if self.loss_scale is not None:
                parse_loss_scale(self.loss_scale)
            of_level = {name: self.overrides[name] for name in _OF_LEVEL if name in self.overrides}
            complaints = list(levels.level(self.opt_level).override(**of_level).complaints())
        except AmpTypeError as e:
            raise AmpValueError(str(e)) from e
        if complaints:
            raise AmpValueError(complaints[0])


_OVERRIDES = [f.name for f in dataclasses.fields(RunPolicy) if f.name not in ("opt_level", "keep_float")]
_OF_LEVEL = ("cast_model_type", "keep_batchnorm_fp32", "master_weights", "loss_scale")
_NUMBER = ((int, float), "a number")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "opt_level": ((str,), 'a level such as "O2"'),
    "cast_model_type": ((str, bool), 'a type such as "float16", or false'),
    "keep_batchnorm_fp32": ((bool,), "true or false"),
    "master_weights": ((bool, str), 'true, false, "split" or "24bit"'),
    "loss_scale": ((int, float, str), '"dynamic", "auto" or a number'),
    "cast_model_outputs": ((str,), 'a type such as "float32"'),
    "min_loss_scale": _NUMBER,
    "max_loss_scale": _NUMBER,
    "moment_dtype": ((str,), 'a type such as "bfloat16", or "8bit"'),
    "casts": ((str,), '"everywhere" or "model"'),
    "cast_inputs": ((bool, str, tuple), 'true, false or a list of names of arguments, such as ["timestep"]'),
}
_EXAMPLE = f'Write for example {{"format": {FORMAT}, "opt_level": "O2", "keep_float": ["encoder.norm"]}}.'


def completed(said: Mapping[str, Any]) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Return the arguments of `initialize`, completed from their policy. Passed arguments win over the policy.

    Args:
        said: the passed arguments by name, without defaults. None counts as not passed, except for `opt_level`.

    Returns:
        The level, arguments besides the level and the policy, and the names of modules to keep in FP32. Raises
        AmpTypeError or AmpValueError if `policy` is no policy, or `opt_level` is not the policy's level.
    """
    policy = said.get("policy")
    others = {name: value for name, value in said.items() if name not in ("opt_level", "policy")}
    if policy is None:
        return said.get("opt_level", DEFAULT_LEVEL), others, ()
    if isinstance(policy, (str, os.PathLike)):
        record, source = RunPolicy.load(policy), os.fspath(policy)
    elif isinstance(policy, RunPolicy):
        record, source = policy, "The policy"
    else:
        raise AmpTypeError(
            f"policy is a {type(policy).__name__}, and has to be the path of a file or an amp.RunPolicy.  Type for "
            'example policy="policy.json".'
        )
    opt_level = said.get("opt_level", record.opt_level)
    if opt_level != record.opt_level:
        raise AmpValueError(
            f"opt_level={opt_level!r} was given with a policy for {record.opt_level!r} ({source}).  Leave opt_level "
            f"out, or write {opt_level!r} in the policy."
        )
    more = {name: value for name, value in record.overrides.items() if others.get(name) is None}
    return record.opt_level, {**others, **more}, tuple(record.keep_float)
