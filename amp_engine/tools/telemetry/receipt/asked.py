"""The section about the arguments of `initialize`."""

from __future__ import annotations

from amp_engine.engine import Engine
from amp_engine.levels import levels
from amp_engine.levels.policy import Policy, parse_skips
from amp_engine.levels.scale_rule import DEFAULT_MAX_LOSS_SCALE
from amp_engine.tools.page.page import Section, Sentence, Table
from amp_engine.tools.telemetry.records import Asked, Property

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
    properties = tuple(Property(name, str(value), str(default)) for name, value, default in rows)
    return Asked(True, level, levels.BRIEFS[level].strip(), properties)


def section(asked: Asked) -> Section:
    """The level in a sentence, and its properties; overrides stand out."""
    found = asked.properties
    rows = [(p.name, p.value, f"the level alone: {p.default}" if p.is_override else "") for p in found]
    table = [Table(rows, marked=[i for i, p in enumerate(found) if p.is_override])] if rows else []
    return Section("Asked for", [Sentence(asked.brief, "soft"), *table])
