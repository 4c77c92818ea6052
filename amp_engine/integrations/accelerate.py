"""Hugging Face Accelerate: `accelerator = use(Accelerator(), opt_level="O2")`, and the loop stays as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import amp
from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.integrations.extras import needs

with needs("accelerate"):
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer

# For the other types Accelerate wraps a model in other ways.
_TAKEN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def use(accelerator: Accelerator, opt_level: str = "O1", **options: Any) -> AmpAccelerator:
    """Return an Accelerator that trains at `opt_level` and replaces `accelerator`, whose state it has.

        accelerator = use(Accelerator(gradient_accumulation_steps=4), opt_level="O2")
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    Args:
        accelerator: before its first `prepare`, with mixed_precision="no"; one process, or DistributedDataParallel.
        opt_level, options: arguments of `amp.initialize`, which `prepare` calls with its models and optimizers.

    Raises AmpValueError or AmpStateError for another accelerator.
    """
    if accelerator.mixed_precision != "no":
        raise AmpValueError(
            f"use() was given an Accelerator with mixed_precision={accelerator.mixed_precision!r}, which casts and "
            f"scales by itself.  Type use(Accelerator(mixed_precision='no'), opt_level={opt_level!r})."
        )
    if accelerator.distributed_type not in _TAKEN:
        raise AmpStateError(
            f"use() was given an Accelerator of {accelerator.distributed_type}, which casts and shards by itself.  Use "
            "one process or MULTI_GPU; for shards call torch's fully_shard(model) before amp.initialize, without use()."
        )
    kind: Any = AmpAccelerator
    if type(accelerator) is not Accelerator:
        kind = type("AmpAccelerator", (AmpAccelerator, type(accelerator)), {})
    return kind(accelerator, {"opt_level": opt_level, **options})


class AmpOptimizer(AcceleratedOptimizer):
    """AcceleratedOptimizer that unscales before it steps, and reports skipped steps to schedulers and Trainer."""

    _is_accelerate_prepared = True  # Accelerator.prepare_optimizer takes it as it is

    def __init__(self, optimizer: Optimizer, device_placement: bool, grad_scaler: amp.GradScaler) -> None:
        super().__init__(optimizer, device_placement)
        self._grad_scaler = grad_scaler

    def step(self, closure: Any = None) -> None:
        """Step if gradients are synchronized; a step whose gradients overflowed does nothing."""
        if self.gradient_state.sync_gradients:
            self._grad_scaler.unscale_(self.optimizer)
        super().step(closure)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step did nothing. Waits for the device."""
        engine = amp.current_engine()
        return self.gradient_state.sync_gradients and engine is not None and engine.step_was_skipped(self.optimizer)


class AmpAccelerator(Accelerator):
    """An Accelerator with the state of another one, whose optimizers amp steps; `use` makes it."""

    def __init__(self, accelerator: Accelerator, options: dict[str, Any]) -> None:
        self.__dict__.update(accelerator.__dict__)
        self._amp_options = options
        self.scaler = amp.GradScaler()  # `backward`, `save_state` and `load_state` use it

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Initialize models and optimizers, if there are optimizers, and prepare everything; see Accelerate."""
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, Optimizer) and not isinstance(one, AmpOptimizer)]
        if optimizers:  # without optimizers, models are only evaluated
            for model in models if self.device_placement else ():
                model.to(self.device)
            amp.initialize(models, optimizers, **self._amp_options)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AmpOptimizer:
        """Wrap an optimizer; see Accelerate."""
        if not isinstance(optimizer, AmpOptimizer):
            placed = self.device_placement if device_placement is None else device_placement
            optimizer = AmpOptimizer(optimizer, placed, self.scaler)
        return super().prepare_optimizer(optimizer, device_placement)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale all gradients now, to look at them."""
        for one in self._optimizers:
            self.scaler.unscale_(one.optimizer)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients that are stepped for `parameters` by their norm, and return the norm."""
        self.unscale_gradients()
        return amp.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each element of the gradients that are stepped for `parameters`."""
        self.unscale_gradients()
        amp.clip_grad_value_(parameters, clip_value)
