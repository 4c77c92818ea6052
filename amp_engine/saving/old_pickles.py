"""Names of modules that pickles of earlier versions have: whole models, loss scalers, policies, averaged models."""

import sys

from amp_engine.casting import forward_casts
from amp_engine.initialization import cast_model, state_dict
from amp_engine.levels import policy, policy_file, scale_rule
from amp_engine.saving import averages
from amp_engine.scaling import scaler

MOVED = {
    "averages": averages,
    "checkpoint": state_dict,
    "forward_casts": forward_casts,
    "model": cast_model,
    "policy": policy,
    "policy_file": policy_file,
    "scale_rule": scale_rule,
    "scaler": scaler,
}
"""Earlier name -> module."""

sys.modules.update({f"amp_engine.{name}": module for name, module in MOVED.items()})
