"""Why a row may be beyond its limits, each reviewed: by architecture, and by what of it."""

REASONS: dict[str, dict[str, str]] = {}
