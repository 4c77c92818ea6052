"""Lightning 2: `Trainer(plugins=AmpPrecision("O2"))`; Fabric: `Fabric(plugins=AmpFabricPrecision())`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from amp_engine import amp
from amp_engine.integrations.extras import needs

with needs("lightning"):
    from lightning.fabric.plugins import Precision as FabricPrecision
    from lightning.pytorch.plugins import Precision


class _WithScaler(FabricPrecision):
    """Keeps the loss scaler of a run, and saves and loads it."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = amp.GradScaler()
        self._last: dict[str, Any] = {}  # the loss scale, after a run

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward of the scaled loss; see Lightning."""
        super().backward(self.scaler.scale(tensor), model, *args, **kwargs)

    def main_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """The weights that `optimizer` steps, with unscaled gradients, to clip these."""
        self.scaler.unscale_(optimizer)
        return amp.master_params(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, also after the run of a Trainer."""
        return self._last if amp.current_engine() is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved loss scale."""
        if state_dict:
            self.scaler.load_state_dict(state_dict)


class AmpPrecision(_WithScaler, Precision):
    """Lightning's precision plugin that trains at a level, for automatic and manual optimization.

    It initializes the LightningModule, and closes amp after the run.

    Args:
        opt_level, options: arguments of `amp.initialize`.
    """

    def __init__(self, opt_level: str = "O1", **options: Any) -> None:
        super().__init__()
        self._options = {"opt_level": opt_level, **options}
        self._module: nn.Module | None = None

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> tuple[Any, Any, Any]:
        """Initialize the model and the optimizers; see Lightning."""
        if optimizers:
            # Lightning wraps the model before it makes optimizers.
            with amp.rewrap(model) if isinstance(model, DistributedDataParallel) else nullcontext(model) as module:
                amp.initialize(module, optimizers, **self._options)
                self._module = module
        return model, optimizers, lr_schedulers

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load weights, which Lightning has loaded into half ones, once more into their masters; see Lightning."""
        if self._module is not None:
            self._module.load_state_dict(checkpoint["state_dict"], strict=False)

    def optimizer_step(self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, then step, or skip; see Lightning."""
        result = closure()
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:  # training_step returned no loss
            return None
        return self.scaler.step(optimizer, **kwargs)

    def teardown(self) -> None:
        """Close amp, which gives the model its own types again."""
        self.scaler.update()  # leaves a `scale_loss` that an error in a backward left open
        self._last, self._module = self.state_dict(), None
        amp.close()


class AmpFabricPrecision(_WithScaler):
    """Fabric's precision plugin, for models and optimizers that `amp.initialize` took before `fabric.setup`."""

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, or skip; see Fabric."""
        return self.scaler.step(optimizer, **kwargs)
