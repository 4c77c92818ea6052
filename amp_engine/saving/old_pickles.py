"""Earlier names of modules, for old pickles of whole models, averages, loss scalers, policies and records."""

import sys

from amp_engine.casting import explanation, forward_casts
from amp_engine.diagnosis import find_overflow, post_mortem
from amp_engine.initialization import cast_model, state_dict
from amp_engine.levels import policy, policy_file, scale_rule
from amp_engine.saving import averages
from amp_engine.scaling import scaler

MOVED = {
    "averages": averages,
    "casting.explain": explanation,
    "checkpoint": state_dict,
    "forward_casts": forward_casts,
    "model": cast_model,
    "policy": policy,
    "policy_file": policy_file,
    "scale_rule": scale_rule,
    "scaler": scaler,
    "telemetry.find_overflow": find_overflow,
    "telemetry.post_mortem": post_mortem,
}
"""Earlier name -> module."""

sys.modules.update({f"amp_engine.{name}": module for name, module in MOVED.items()})
