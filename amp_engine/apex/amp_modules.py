"""Modules of `apex.amp` that have only names of other modules or one small function, created without own files."""

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor

import amp_engine
from amp_engine import amp as engine
from amp_engine.apex_private.handle import Handle, NoOpHandle
from amp_engine.apex_private.stash import Stash
from amp_engine.ground.containers import map_tensors
from amp_engine.scaling.scaler import LossScaler


def made(name: str, **contents: Any) -> ModuleType:
    """Create the module `amp_engine.apex.amp.<name>`, which an import of that name finds from now on."""
    module = ModuleType(f"amp_engine.apex.amp.{name}", f"`apex.amp.{name}`.")
    # The spec tells importlib that the import of a module in sys.modules is done, and our finder that it is ours.
    module.__spec__ = ModuleSpec(module.__name__, None)
    vars(module).update(contents)
    sys.modules[module.__name__] = module
    return module


def has_old_rnns() -> bool:
    """Return False: torch's recurrent layers are newer than torch 1.0."""
    return False


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """Return the names in `attrs` that `module` has."""
    return [name for name in attrs if hasattr(module, name)]


def is_fp_tensor(x: Any) -> bool:
    """Return True for a floating tensor, and for a list or tuple of nothing else."""
    if isinstance(x, (list, tuple)):
        return all(map(is_fp_tensor, x))
    return isinstance(x, Tensor) and x.is_floating_point()


__version__ = made("__version__", __version__=amp_engine.__version__)
_initialize = made("_initialize", applier=map_tensors)
_process_optimizer = made("_process_optimizer", AmpOptimizerState=Stash)
amp = made(
    "amp",
    _amp_state=engine._amp_state,
    AmpHandle=Handle,
    NoOpHandle=NoOpHandle,
    disable_casts=engine.disable_casts,
    float_function=engine.float_function,
    half_function=engine.half_function,
    init=engine.init,
    initialize=engine.initialize,
    load_state_dict=engine.load_state_dict,
    master_params=engine.master_params,
    promote_function=engine.promote_function,
    register_float_function=engine.register_float_function,
    register_half_function=engine.register_half_function,
    register_promote_function=engine.register_promote_function,
    scale_loss=engine.scale_loss,
    state_dict=engine.state_dict,
)
compat = made("compat", filter_attrs=filter_attrs)
handle = made(
    "handle",
    AmpHandle=Handle,
    NoOpHandle=NoOpHandle,
    disable_casts=engine.disable_casts,
    scale_loss=engine.scale_loss,
)
rnn_compat = made("rnn_compat", has_old_rnns=has_old_rnns)
scaler = made("scaler", LossScaler=LossScaler)
utils = made("utils", is_fp_tensor=is_fp_tensor)
