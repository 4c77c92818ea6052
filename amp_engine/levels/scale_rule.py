"""The rule of a dynamic loss scale, as users choose it."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from amp_engine.errors import AmpValueError

DEFAULT_MIN_LOSS_SCALE = 2.0**-24
DEFAULT_MAX_LOSS_SCALE = 2.0**24


@dataclass(frozen=True)
class DynamicLossScale:
    """A dynamic loss scale with numbers of your own.

        amp.initialize(model, optimizer, opt_level="O2", loss_scale=amp.DynamicLossScale(growth_interval=500))

    Attributes:
        init_scale: the first scale, above 0; `max_loss_scale` if that is lower. Default as in apex and torch, 2**16.
        growth_factor: factor of the scale after `growth_interval` clean backwards in a row; above 1.
        backoff_factor: factor of the scale at an overflow; between 0 and 1.
        growth_interval: at least 1. Default as in apex and torch, 2000.
        hysteresis: number of the overflow, since the last clean backward, that lowers the scale: 1 is the first, as in
            apex and torch; 2 forgives one. Steps are skipped either way. As in Megatron-LM, whose default is 2.
        min_loss_scale: floor; None: the floor of `initialize`, or else 2**-24.
        max_loss_scale: ceiling; None: the ceiling of `initialize`, by default 2**24.

    Raises AmpValueError for values out of range.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_loss_scale: float | None = None
    max_loss_scale: float | None = None

    def __post_init__(self) -> None:
        self._check_number("init_scale", 0, math.inf, "a positive finite number", "2.0**16")
        self._check_number("growth_factor", 1, math.inf, "a finite number above 1", "2.0")
        self._check_number("backoff_factor", 0, 1, "a number between 0 and 1", "0.5")
        low, high = self.min_loss_scale, self.max_loss_scale
        if low is not None and low != 0:
            self._check_number("min_loss_scale", 0, math.inf, "None or a finite number from 0 on", "1.0")
        if high is not None:
            self._check_number("max_loss_scale", 0, math.inf, "None or a positive finite number", "2.0**24")
        if low is not None and high is not None:
            self._check("max_loss_scale", low <= high, f"at least min_loss_scale, which is {low!r},", f"{low!r}")
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            self._check(name, is_count, "a whole number from 1 on", "2000" if name == "growth_interval" else "2")

    def _check_number(self, name: str, above: float, below: float, allowed: str, example: str) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        self._check(name, is_number and above < value < below, allowed, example)

    def _check(self, name: str, is_right: bool, allowed: str, example: str) -> None:
        if not is_right:
            raise AmpValueError(
                f"DynamicLossScale({name}={getattr(self, name)!r}): {name} is {allowed}.  Type for example "
                f"{name}={example}."
            )

    def __str__(self) -> str:
        """Return the numbers that are not defaults, which `parse` reads: `dynamic(growth_interval=500)`."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = {f.name: given[f.name] for f in dataclasses.fields(self) if given[f.name] != f.default}
        return f"dynamic({' '.join(f'{name}={value}' for name, value in changed.items())})"

    @classmethod
    def parse(cls, text: str) -> DynamicLossScale | None:
        """Return the rule that `str` wrote; None for other texts. Raises AmpValueError for values out of range."""
        match = re.fullmatch(r"dynamic\((.*)\)", text)
        if match is None:
            return None
        names = {f.name for f in dataclasses.fields(cls)}
        values: dict[str, float | int | None] = {}
        for pair in match[1].split():
            name, _, value = pair.partition("=")
            if name not in names or not re.fullmatch(r"[-+.\w]+", value):
                return None
            try:
                whole = name in ("growth_interval", "hysteresis")
                values[name] = None if value == "None" else int(value) if whole else float(value)
            except ValueError:
                return None
        return cls(**values)  # type: ignore[arg-type]
