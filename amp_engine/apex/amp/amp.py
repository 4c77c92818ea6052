"""`apex.amp.amp`: the functions of `apex.amp`."""

from amp_engine.amp import disable_casts as disable_casts
from amp_engine.amp import float_function as float_function
from amp_engine.amp import half_function as half_function
from amp_engine.amp import init as init
from amp_engine.amp import initialize as initialize
from amp_engine.amp import load_state_dict as load_state_dict
from amp_engine.amp import master_params as master_params
from amp_engine.amp import promote_function as promote_function
from amp_engine.amp import register_float_function as register_float_function
from amp_engine.amp import register_half_function as register_half_function
from amp_engine.amp import register_promote_function as register_promote_function
from amp_engine.amp import scale_loss as scale_loss
from amp_engine.amp import state_dict as state_dict
from amp_engine.apex.amp._amp_state import _amp_state as _amp_state
from amp_engine.apex_private.handle import Handle as AmpHandle
from amp_engine.apex_private.handle import NoOpHandle as NoOpHandle

__all__ = [
    "AmpHandle",
    "NoOpHandle",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
