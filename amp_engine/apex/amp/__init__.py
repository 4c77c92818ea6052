"""`apex.amp`, with the names of `amp_engine.amp` that apex has not."""

from typing import Any

from amp_engine import amp as _amp
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
from amp_engine.apex.amp import frontend as frontend
from amp_engine.apex.amp import lists as lists

# This import first binds the attribute `_amp_state` to the submodule of that name, then to the object.
from amp_engine.apex.amp._amp_state import _amp_state as _amp_state
from amp_engine.apex.amp_modules import __version__ as __version__
from amp_engine.apex.amp_modules import _initialize as _initialize
from amp_engine.apex.amp_modules import _process_optimizer as _process_optimizer
from amp_engine.apex.amp_modules import amp as amp
from amp_engine.apex.amp_modules import compat as compat
from amp_engine.apex.amp_modules import handle as handle
from amp_engine.apex.amp_modules import rnn_compat as rnn_compat
from amp_engine.apex.amp_modules import scaler as scaler
from amp_engine.apex.amp_modules import utils as utils


def __getattr__(name: str) -> Any:
    if name in _amp.__all__:
        return getattr(_amp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
