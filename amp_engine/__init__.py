"""amp_engine: the successor of apex.amp on today's PyTorch.

from amp_engine import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""

from amp_engine import amp as amp
from amp_engine.amp import _amp_state as _amp_state
from amp_engine.amp import averaged_model as averaged_model
from amp_engine.amp import casts as casts
from amp_engine.amp import clip_grad_norm_ as clip_grad_norm_
from amp_engine.amp import close as close
from amp_engine.amp import compare_levels as compare_levels
from amp_engine.amp import convert_state_dict as convert_state_dict
from amp_engine.amp import current_engine as current_engine
from amp_engine.amp import disable_casts as disable_casts
from amp_engine.amp import explain as explain
from amp_engine.amp import export_state_dict as export_state_dict
from amp_engine.amp import find_fp32_modules as find_fp32_modules
from amp_engine.amp import find_overflow as find_overflow
from amp_engine.amp import float_function as float_function
from amp_engine.amp import fsdp_policy as fsdp_policy
from amp_engine.amp import get_scale as get_scale
from amp_engine.amp import gradient_histogram as gradient_histogram
from amp_engine.amp import half_function as half_function
from amp_engine.amp import init as init
from amp_engine.amp import initialize as initialize
from amp_engine.amp import keep_float as keep_float
from amp_engine.amp import last_step as last_step
from amp_engine.amp import load as load
from amp_engine.amp import load_optimizer_state_dict as load_optimizer_state_dict
from amp_engine.amp import load_state_dict as load_state_dict
from amp_engine.amp import master_params as master_params
from amp_engine.amp import named_masters as named_masters
from amp_engine.amp import optimizer_state_dict as optimizer_state_dict
from amp_engine.amp import original as original
from amp_engine.amp import overflow_report as overflow_report
from amp_engine.amp import promote_function as promote_function
from amp_engine.amp import receipt as receipt
from amp_engine.amp import register_float_function as register_float_function
from amp_engine.amp import register_half_function as register_half_function
from amp_engine.amp import register_promote_function as register_promote_function
from amp_engine.amp import save as save
from amp_engine.amp import scalars as scalars
from amp_engine.amp import scale as scale
from amp_engine.amp import scale_loss as scale_loss
from amp_engine.amp import state_dict as state_dict
from amp_engine.amp import step_scheduler as step_scheduler
from amp_engine.amp import step_times as step_times
from amp_engine.amp import training_state as training_state
from amp_engine.amp import unscale as unscale
from amp_engine.amp import watch_gradients as watch_gradients
from amp_engine.engine import Engine as Engine
from amp_engine.errors import AmpError as AmpError
from amp_engine.errors import AmpFileError as AmpFileError
from amp_engine.errors import AmpGradientWarning as AmpGradientWarning
from amp_engine.errors import AmpIndexError as AmpIndexError
from amp_engine.errors import AmpRuntimeWarning as AmpRuntimeWarning
from amp_engine.errors import AmpStateError as AmpStateError
from amp_engine.errors import AmpTypeError as AmpTypeError
from amp_engine.errors import AmpValueError as AmpValueError
from amp_engine.errors import AmpWarning as AmpWarning
from amp_engine.levels.policy import Policy as Policy
from amp_engine.levels.policy_file import RunPolicy as RunPolicy
from amp_engine.levels.scale_rule import DynamicLossScale as DynamicLossScale
from amp_engine.saving import old_pickles as _old_pickles  # noqa: F401

__version__ = "0.1.0"

__all__ = [
    "AmpError",
    "AmpFileError",
    "AmpGradientWarning",
    "AmpIndexError",
    "AmpRuntimeWarning",
    "AmpStateError",
    "AmpTypeError",
    "AmpValueError",
    "AmpWarning",
    "DynamicLossScale",
    "Engine",
    "Policy",
    "RunPolicy",
    "amp",
    "averaged_model",
    "casts",
    "clip_grad_norm_",
    "close",
    "compare_levels",
    "convert_state_dict",
    "current_engine",
    "disable_casts",
    "explain",
    "export_state_dict",
    "find_fp32_modules",
    "find_overflow",
    "float_function",
    "fsdp_policy",
    "get_scale",
    "gradient_histogram",
    "half_function",
    "init",
    "initialize",
    "keep_float",
    "last_step",
    "load",
    "load_optimizer_state_dict",
    "load_state_dict",
    "master_params",
    "named_masters",
    "optimizer_state_dict",
    "original",
    "overflow_report",
    "promote_function",
    "receipt",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "save",
    "scalars",
    "scale",
    "scale_loss",
    "state_dict",
    "step_scheduler",
    "step_times",
    "training_state",
    "unscale",
    "watch_gradients",
]
