"""The module-level interface, in apex's shape: every call goes to the one current Engine.

This is the only module of the package that holds an engine: the current one, in `_amp_state`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from amp_engine import casting
from amp_engine.apex_private.handle import Handle, NoOpHandle
from amp_engine.apex_private.state import AmpState
from amp_engine.casting import Explanation, Registration, deferred
from amp_engine.casting import original as original
from amp_engine.diagnosis.find_overflow import OverflowSource
from amp_engine.diagnosis.post_mortem import OverflowReport
from amp_engine.engine import Engine
from amp_engine.initialization import arguments, initialized
from amp_engine.levels.fsdp import fsdp_policy as fsdp_policy
from amp_engine.levels.policy_file import RunPolicy as RunPolicy
from amp_engine.levels.scale_rule import DynamicLossScale as DynamicLossScale
from amp_engine.optimizers import LARC
from amp_engine.saving import by_name
from amp_engine.saving.averages import AveragedModel, AvgFn, MultiAvgFn
from amp_engine.saving.by_name import export_state_dict as export_state_dict
from amp_engine.saving.by_name import load_optimizer_state_dict as load_optimizer_state_dict
from amp_engine.saving.by_name import named_masters as named_masters
from amp_engine.saving.by_name import optimizer_state_dict as optimizer_state_dict
from amp_engine.saving.scaler_state import ScalerFormat
from amp_engine.saving.scaler_state import convert_state_dict as convert_state_dict
from amp_engine.scaling.by_hand import Gradients
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.last_step import LastStep
from amp_engine.telemetry import gradient_histogram as _histograms
from amp_engine.telemetry import receipt as _receipts
from amp_engine.telemetry import scalars as _scalars
from amp_engine.telemetry.compare_levels import compare_levels as compare_levels
from amp_engine.telemetry.fp32_modules import find_fp32_modules as find_fp32_modules
from amp_engine.telemetry.gradient_histogram import GradientHistogram
from amp_engine.telemetry.gradient_watch import GradientWatch
from amp_engine.telemetry.receipt import Receipt
from amp_engine.telemetry.step_times import StepTimes

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=nn.Module)


_amp_state = AmpState()


def current_engine() -> Engine | None:
    """The engine that the functions of this module speak to, or None before `initialize`."""
    return None if _amp_state.engine.policy is None else _amp_state.engine


def replace_engine(engine: Engine) -> None:
    """Let the functions of this module speak to `engine` from now on. The one before is left as it is, not closed."""
    _amp_state.engine = engine


if TYPE_CHECKING:
    initialize = _amp_state.engine.initialize
else:

    @functools.wraps(Engine.initialize, assigned=("__doc__", "__annotations__"))
    def initialize(*args, **keywords):
        arguments.check_keywords("amp.initialize", keywords, initialize.__signature__.parameters)
        return _amp_state.engine.initialize(*args, **keywords)

    # As editors and help() show it.
    initialize.__signature__ = inspect.signature(_amp_state.engine.initialize)


def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | LARC | Iterable[Optimizer | LARC] | None,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    return _amp_state.engine.scale_loss(loss, optimizers, loss_id, model, delay_unscale, delay_overflow_check)


def get_scale(loss_id: int = 0) -> Tensor:
    """The scale that the next backward of this loss uses, to log it: float32, shape [], a copy on the losses' device.

    No host sync; `float(amp.get_scale())` is one. Of several ranks it waits for the agreement on the last backward.
    1 if not enabled.

    Raises AmpStateError before `initialize`, AmpIndexError for a loss_id that there is not.
    """
    return _amp_state.engine.get_scale(loss_id)


def scale(loss: Tensor, loss_id: int = 0) -> Tensor:
    """`loss.float() * scale`, to call `torch.autograd.grad` on: for gradient penalties and other double backwards.

        gradients = torch.autograd.grad(amp.scale(loss), model.parameters(), create_graph=True)
        penalty = sum(g.square().sum() for g in amp.unscale(gradients))
        with amp.scale_loss(loss + penalty, optimizer) as scaled_loss:
            scaled_loss.backward()

    Args:
        loss: any shape, any floating type.
        loss_id: whose scale; that of the `scale_loss` that the gradients end up in.

    Returns:
        float32, of the loss's shape, in its graph; the loss itself if not enabled. Where no loss is scaled the scale
        is 1.

    Raises AmpStateError before `initialize`, AmpTypeError or AmpIndexError. No host sync.
    """
    return _amp_state.engine.scale(loss, loss_id)


def unscale(gradients: Gradients, loss_id: int = 0) -> Gradients:
    """Gradients of `amp.scale(loss)`, divided by its scale.

    A value that is not finite counts as an overflow of the next `scale_loss` with this `loss_id`, also if the loss
    made from it is finite, as behind a clamp: the step is skipped and the scale falls.

    Args:
        gradients: what `torch.autograd.grad` gave, a tuple in which an entry may be None, a list, or one tensor.
        loss_id: as passed to `scale`.

    Returns:
        The same shapes in a container of the same kind, in the graph: float32, or float64 where that was given. The
        argument itself if not enabled.

    Raises AmpStateError if `scale` was not called since a `scale_loss` of this `loss_id` was left, since the scale
    may have changed; AmpTypeError or AmpIndexError. No host sync.
    """
    return _amp_state.engine.unscale(gradients, loss_id)


def master_params(optimizer: Optimizer | LARC) -> Iterator[nn.Parameter]:
    return _amp_state.engine.master_params(optimizer)


def clip_grad_norm_(
    optimizer: Optimizer | LARC, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    return _amp_state.engine.clip_grad_norm_(optimizer, max_norm, norm_type, error_if_nonfinite)


def averaged_model(
    model: nn.Module,
    optimizer: Optimizer | LARC | Sequence[Optimizer | LARC] | None = None,
    device: int | torch.device | None = None,
    avg_fn: AvgFn | None = None,
    multi_avg_fn: MultiAvgFn | None = None,
    use_buffers: bool = False,
) -> AveragedModel:
    return _amp_state.engine.averaged_model(model, optimizer, device, avg_fn, multi_avg_fn, use_buffers)


def state_dict(
    destination: OrderedDict[str, Any] | None = None, *, format: ScalerFormat = "amp"
) -> OrderedDict[str, Any]:
    return _amp_state.engine.state_dict(destination, format=format)


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    _amp_state.engine.load_state_dict(state_dict)


def training_state(model: nn.Module, optimizer: Optimizer | LARC | Sequence[Optimizer | LARC]) -> by_name.TrainingState:
    return _amp_state.engine.training_state(model, optimizer)


def save(path: str | os.PathLike[str], /, **objects: Any) -> None:
    _amp_state.engine.save(path, **objects)


def load(path: str | os.PathLike[str], /, *, map_location: Any = "cpu", **objects: Any) -> dict[str, Any]:
    return _amp_state.engine.load(path, map_location=map_location, **objects)


def casts() -> AbstractContextManager[None]:
    return _amp_state.engine.casts()


def disable_casts() -> AbstractContextManager[None]:
    return _amp_state.engine.disable_casts()


def keep_float(module: M, keep: bool = True) -> M:
    return _amp_state.engine.keep_float(module, keep)


def explain() -> Explanation:
    return _amp_state.engine.explain()


def overflow_report() -> OverflowReport:
    return _amp_state.engine.overflow_report()


def find_overflow(step_fn: Callable[[], Any], loss_scale: float | None = None) -> OverflowSource:
    return _amp_state.engine.find_overflow(step_fn, loss_scale)


def last_step(optimizer: Optimizer | LARC | None = None) -> LastStep:
    return _amp_state.engine.last_step(optimizer)


def step_scheduler(scheduler: LRScheduler, optimizer: Optimizer | LARC | None = None) -> int:
    return _amp_state.engine.step_scheduler(scheduler, optimizer)


def receipt(
    explanation: Explanation | None = None, times: StepTimes | None = None, gradients: GradientHistogram | None = None
) -> Receipt:
    return _receipts.receipt(_amp_state.engine, explanation, times, gradients)


def gradient_histogram(step_fn: Callable[[], Any], dtype: torch.dtype | None = None) -> GradientHistogram:
    return _histograms.gradient_histogram(_amp_state.engine, step_fn, dtype)


def watch_gradients(every: int = 100, dtype: torch.dtype | None = None) -> GradientWatch:
    return GradientWatch(_amp_state.engine, every, dtype)


def step_times() -> StepTimes:
    return StepTimes(_amp_state.engine)


def scalars() -> dict[str, float]:
    return _scalars.scalars(_amp_state.engine)


def close() -> None:
    _amp_state.engine.close()


_AS_ENGINE = "scale_loss clip_grad_norm_ averaged_model state_dict load_state_dict training_state save "
_AS_ENGINE += "load casts disable_casts explain step_scheduler last_step find_overflow overflow_report close"
for _name in _AS_ENGINE.split():
    globals()[_name].__doc__ = getattr(Engine, _name).__doc__
master_params.__doc__ = initialized.master_params.__doc__
keep_float.__doc__ = casting.keep_float.__doc__
receipt.__doc__ = _receipts.receipt.__doc__
gradient_histogram.__doc__ = _histograms.gradient_histogram.__doc__
watch_gradients.__doc__ = GradientWatch.__doc__
step_times.__doc__ = StepTimes.__doc__
scalars.__doc__ = _scalars.scalars.__doc__


def half_function(fn: F) -> F:
    """Decorator: cast floating arguments of `fn` to half (O4: bfloat16) while O1 is on; weights through the cache.

    O2, O3 and O5 cast no functions, and say so when it is called.
    """
    return deferred("half", fn, _current_casts, _not_cast)


def float_function(fn: F) -> F:
    """Decorator: cast low-precision arguments of `fn` to float32 while O1 (O4) is on.

    O2, O3 and O5 cast no functions, and say so when it is called: there, write `x.float()` in it.
    """
    return deferred("float", fn, _current_casts, _not_cast)


def promote_function(fn: F) -> F:
    """Decorator: cast floating arguments of `fn` to the widest type among them while O1 (O4) is on.

    O2, O3 and O5 cast no functions, and say so when it is called.
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
    "LossScaler",
    "RunPolicy",
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


def __dir__() -> list[str]:
    return [*__all__]
