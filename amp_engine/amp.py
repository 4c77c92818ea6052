"""The module-level interface, in apex's shape: every call goes to the one current Engine.

This is the only module of the package that holds an engine: the current one, in `_amp_state`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer

from amp_engine import grad_scaler as _grad_scaler
from amp_engine.apex_private.handle import Handle, NoOpHandle
from amp_engine.apex_private.state import AmpState
from amp_engine.casting import Registration, deferred
from amp_engine.casting import original as original
from amp_engine.engine import Engine
from amp_engine.errors import AmpTypeError
from amp_engine.ground import tools as _tools
from amp_engine.initialization.arguments import check_keywords
from amp_engine.initialization.rewrap import rewrap as rewrap
from amp_engine.levels.fsdp import fsdp_policy as fsdp_policy
from amp_engine.levels.scale_rule import DynamicLossScale as DynamicLossScale
from amp_engine.optimizers import LARC
from amp_engine.saving.averages import averaged_weights as averaged_weights
from amp_engine.saving.by_name import export_state_dict as export_state_dict
from amp_engine.saving.by_name import named_masters as named_masters
from amp_engine.saving.scaler_state import convert_state_dict as convert_state_dict
from amp_engine.scaling.scaler import LossScaler as LossScaler

if TYPE_CHECKING:
    from amp_engine.tools.policy_file import RunPolicy as RunPolicy
    from amp_engine.tools.telemetry.compare_levels import compare_levels as compare_levels
    from amp_engine.tools.telemetry.fp32_modules import find_fp32_modules as find_fp32_modules

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


_amp_state = AmpState(Engine())


def current_engine() -> Engine | None:
    """The engine that the functions of this module call, or None before `initialize`."""
    return None if _amp_state.engine.policy is None else _amp_state.engine


def replace_engine(engine: Engine) -> None:
    """Make the functions of this module call `engine` from now on. The previous engine is not closed."""
    _amp_state.engine = engine


def _of_current_engine(function: Callable[Concatenate[Engine, P], R]) -> Callable[P, R]:
    """Wrap `function`, which gets the current engine as its first argument; the docstring stays."""
    name = function.__name__
    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()
    takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)

    @functools.wraps(function, assigned=("__name__", "__doc__", "__annotations__"))
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if keywords and not takes_any_keyword:
            check_keywords(f"amp.{name}", keywords, [p.name for p in parameters])
        # Looked up on the engine, since a subclass or an attribute of the engine may replace the method.
        found: R = getattr(_amp_state.engine, name)(*args, **keywords)
        return found

    call.__qualname__ = name
    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    return call


initialize = _of_current_engine(Engine.initialize)
scale_loss = _of_current_engine(Engine.scale_loss)
get_scale = _of_current_engine(Engine.get_scale)
scale = _of_current_engine(Engine.scale)
unscale = _of_current_engine(Engine.unscale)
master_params = _of_current_engine(Engine.master_params)
on_masters = _of_current_engine(Engine.on_masters)
clip_grad_norm_ = _of_current_engine(Engine.clip_grad_norm_)
clip_grad_value_ = _of_current_engine(Engine.clip_grad_value_)
averaged_model = _of_current_engine(Engine.averaged_model)
state_dict = _of_current_engine(Engine.state_dict)
load_state_dict = _of_current_engine(Engine.load_state_dict)
training_state = _of_current_engine(Engine.training_state)
save = _of_current_engine(Engine.save)
load = _of_current_engine(Engine.load)
casts = _of_current_engine(Engine.casts)
disable_casts = _of_current_engine(Engine.disable_casts)
keep_float = _of_current_engine(Engine.keep_float)
last_step = _of_current_engine(Engine.last_step)
step_scheduler = _of_current_engine(Engine.step_scheduler)
close = _of_current_engine(Engine.close)

if TYPE_CHECKING:
    audit_updates = _of_current_engine(Engine.audit_updates)
    explain = _of_current_engine(Engine.explain)
    find_overflow = _of_current_engine(Engine.find_overflow)
    gradient_histogram = _of_current_engine(Engine.gradient_histogram)
    overflow_report = _of_current_engine(Engine.overflow_report)
    receipt = _of_current_engine(Engine.receipt)
    scalars = _of_current_engine(Engine.scalars)
    step_times = _of_current_engine(Engine.step_times)
    watch_gradients = _of_current_engine(Engine.watch_gradients)
else:

    def __getattr__(name: str) -> Any:
        """A tool, which is loaded when it is first asked for."""
        if name in _tools.OF_ENGINE:
            found = _of_current_engine(getattr(_tools.tool(_tools.OF_ENGINE[name]), name))
        elif name in _tools.OTHERS:
            found = getattr(_tools.tool(_tools.OTHERS[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, found)


def _engine() -> Engine:
    return _amp_state.engine


class GradScaler(_grad_scaler.GradScaler):
    """The methods and the state of torch.amp.GradScaler, for loops and libraries that are written for it.

        scaler = amp.GradScaler()                    # after or before amp.initialize
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.unscale_(optimizer)                   # to clip; may be left out
        amp.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    Args:
        optimizers: the optimizers that its losses may reach; without any, all initialized optimizers.
        loss_id: the index of the loss's scaler.

    If gradients overflow, every optimizer that the loss reaches skips its step. The scale is adjusted once per step,
    when gradients are unscaled, by the numbers of `initialize(loss_scale=amp.DynamicLossScale(...))`.
    """

    def __init__(self, *optimizers: Optimizer | LARC, loss_id: int = 0, **of_torchs: Any) -> None:
        for name in of_torchs:
            raise AmpTypeError(
                f"GradScaler() takes no {name}=: the engine has it.  Type amp.GradScaler(), and amp.initialize(..., "
                "enabled=..., loss_scale=amp.DynamicLossScale(init_scale=..., growth_interval=...))."
            )
        super().__init__(_engine, optimizers, loss_id)


def half_function(fn: F) -> F:
    """Decorator: cast floating arguments of `fn` to half (O4: bfloat16) while O1 is on; weights through the cache.

    O2, O3 and O5 cast no functions, and print a message at the first call of a decorated function.
    """
    return deferred("half", fn, _current_casts, _not_cast)


def float_function(fn: F) -> F:
    """Decorator: cast low-precision arguments of `fn` to float32 while O1 (O4) is on.

    O2, O3 and O5 cast no functions, and print a message at the first call: there, write `x.float()` in `fn`.
    """
    return deferred("float", fn, _current_casts, _not_cast)


def promote_function(fn: F) -> F:
    """Decorator: cast floating arguments of `fn` to the widest type among them while O1 (O4) is on.

    O2, O3 and O5 cast no functions, and print a message at the first call of a decorated function.
    """
    return deferred("promote", fn, _current_casts, _not_cast)


def register_half_function(module: Any, name: str) -> None:
    """Under O1, run `module.name` in half (O4: bfloat16). Raises ValueError if there is no such function."""
    _amp_state.engine.function_casts.register(Registration("half", module, name))


def register_float_function(module: Any, name: str) -> None:
    """Under O1, run `module.name` in float32. Raises ValueError if there is no such function."""
    _amp_state.engine.function_casts.register(Registration("float", module, name))


def register_promote_function(module: Any, name: str) -> None:
    """Under O1, run `module.name` in the widest type of its arguments. Raises ValueError if it does not exist."""
    _amp_state.engine.function_casts.register(Registration("promote", module, name))


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> Handle | NoOpHandle:
    """Cast functions without a model or optimizer, as apex's old handle API did; for inference and tests.

    `loss_scale` is ignored, as in apex, where the optimizer wrapper had scalers of its own.
    """
    del loss_scale
    if not enabled:
        return NoOpHandle()
    _amp_state.engine.function_casts.install(
        torch.float16, enable_caching=enable_caching, allow_banned=allow_banned, verbose=verbose
    )
    return Handle(_amp_state.engine)


def _current_casts() -> Any:
    return _amp_state.engine.function_casts.casts


def _not_cast(kind: str, name: str) -> None:
    _amp_state.engine.function_casts.note_without(kind, name)


__all__ = [
    "DynamicLossScale",
    "GradScaler",
    "LossScaler",
    "RunPolicy",
    "audit_updates",
    "averaged_model",
    "averaged_weights",
    "casts",
    "clip_grad_norm_",
    "clip_grad_value_",
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
    "load_state_dict",
    "master_params",
    "named_masters",
    "on_masters",
    "original",
    "overflow_report",
    "promote_function",
    "receipt",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "rewrap",
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


def __dir__() -> list[str]:
    return [*__all__]
