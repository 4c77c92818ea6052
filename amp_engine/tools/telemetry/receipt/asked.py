"""The section about the arguments of `initialize`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from amp_engine.engine import Engine
from amp_engine.levels import levels
from amp_engine.levels.policy import Policy, parse_skips
from amp_engine.levels.scale_rule import DEFAULT_MAX_LOSS_SCALE
from amp_engine.tools.page.page import Section, Sentence, Table


@dataclass(frozen=True)
class Property:
    """A property of a level.

    Attributes:
        name: the keyword of `initialize`.
        value: the value in effect.
        default: the default of the level.
    """

    name: str
    value: str
    default: str

    @property
    def is_override(self) -> bool:
        """True if the value is not the default of the level."""
        return self.value != self.default


@dataclass(frozen=True)
class Asked:
    """The arguments of `initialize`.

    Attributes:
        enabled: False if amp does nothing.
        level: "O0" to "O5"; None if not enabled.
        brief: the level in a sentence.
        properties: the properties, in the order in which `initialize` prints them.
    """

    enabled: bool
    level: str | None
    brief: str
    properties: tuple[Property, ...]


_DEFAULTS = {"moment_dtype": torch.float32, "gradients": "float32", "release_gradients": False, "masters_on": None}
NOT_ENABLED = Asked(False, None, "enabled=False: amp leaves everything as it is.", ())


def described(engine: Engine, policy: Policy) -> Asked:
    """The level, and each property with the default of the level. Changes nothing. No host sync."""
    level = str(policy.opt_level)
    defaults = levels.level(level).properties()
    rows = [(name, value, defaults[name]) for name, value in policy.properties().items()]
    rows += [
        ("num_losses", len(engine.scalers), 1),
        ("min_loss_scale", engine.min_loss_scale, None),
        ("max_loss_scale", engine.max_loss_scale, DEFAULT_MAX_LOSS_SCALE),
    ]
    skips, default = engine._scaling.skips, parse_skips("auto", policy)
    if isinstance(policy.loss_scale, float) or skips is not default:  # dynamic scales skip whatever it says
        rows.append(("skip_on_overflow", skips.value, default.value))
    if (casts := engine.function_casts.casts) is not None:
        rows.append(("casts", "everywhere" if casts.everywhere else "model", "everywhere"))
    rows += [(name, value, _DEFAULTS[name]) for name, value in engine._initialized.options().items()]
    properties = tuple(Property(name, str(value), str(default)) for name, value, default in rows)
    return Asked(True, level, levels.BRIEFS[level].strip(), properties)


def section(asked: Asked) -> Section:
    """The level in a sentence, and its properties; overrides stand out."""
    found = asked.properties
    rows = [(p.name, p.value, f"the level alone: {p.default}" if p.is_override else "") for p in found]
    table = [Table(rows, marked=[i for i, p in enumerate(found) if p.is_override])] if rows else []
    return Section("Asked for", [Sentence(asked.brief, "soft"), *table])
