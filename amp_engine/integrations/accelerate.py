"""Hugging Face Accelerate: `accelerator = use(Accelerator(), opt_level="O2")`, and the loop stays as it is."""

from __future__ import annotations

from typing import Any

from torch import nn
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
            f"scales by itself.  Type use(Accelerator(mixed_precision='no'), opt_level={opt_level!r}), and in the "
            "arguments of a Trainer bf16=False, fp16=False."
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
    """AcceleratedOptimizer that reports amp's skipped steps to schedulers and Trainer."""

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
        optimizers = [one for one in args if isinstance(one, Optimizer) and not isinstance(one, AcceleratedOptimizer)]
        if optimizers:  # without optimizers, models are only evaluated
            for model in models if self.device_placement else ():
                model.to(self.device)
            amp.initialize(models, optimizers, **self._amp_options)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap an optimizer; see Accelerate."""
        prepared: AcceleratedOptimizer = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = AmpOptimizer
        return prepared

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale all gradients now, to clip or look at them."""
        self.scaler.unscale_(optimizer)
