"""Hugging Face transformers: `AmpTrainer(model, args, ..., opt_level="O2")` in place of `Trainer(model, args, ...)`."""

from __future__ import annotations

from typing import Any

import torch

from amp_engine import amp
from amp_engine.errors import AmpValueError
from amp_engine.integrations.extras import needs

with needs("transformers"):
    import accelerate  # noqa: F401  # before our module for it, which would name its own extra
    from transformers import Trainer

    from amp_engine.integrations.accelerate import use

_CASTS_BY_ITSELF = ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")


class AmpTrainerMixin:
    """Trains a Trainer, or a subclass, at a level: `class Mine(AmpTrainerMixin, Seq2SeqTrainer): pass`.

    It saves FP32, so that training resumes exactly; `from_pretrained` loads the type that the model had before
    training.

    Args:
        args, kwargs: of the Trainer.
        opt_level: the level, as in `amp.initialize`.
        amp_options: further arguments of `amp.initialize`.

    Raises AmpValueError if TrainingArguments ask for a precision too.
    """

    accelerator: Any
    args: Any
    model: Any

    def __init__(
        self, *args: Any, opt_level: str = "O1", amp_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._amp_options = {"opt_level": opt_level, **(amp_options or {})}
        self._arrived: tuple[Any, torch.dtype | None] = (None, None)  # the model, and its type before training
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; see transformers."""
        for name in _CASTS_BY_ITSELF:
            if getattr(self.args, name):
                raise AmpValueError(
                    f"TrainingArguments({name}=True) casts the model by itself, beside "
                    f"opt_level={self._amp_options['opt_level']!r}.  Leave {name} out."
                )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = use(self.accelerator, **self._amp_options)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, before the model is cast; see transformers."""
        if self._arrived[0] is not self.model:
            self._arrived = self.model, getattr(self.model, "dtype", None)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the loss scale and the skips beside the training loss; see transformers."""
        if amp.current_engine() is not None and "loss" in logs:
            logs = {**logs, **amp.scalars()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        model, dtype = self._arrived
        is_cast = model is self.model and dtype is not None and model.dtype != dtype
        if is_cast and state_dict is None:
            state_dict = amp.export_state_dict(model, torch.float32)  # has tied weights once
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        if is_cast and self.args.should_save:  # the config has the type of the cast model now
            model.config.update({"dtype": str(dtype).removeprefix("torch.")})
            model.config.save_pretrained(output_dir or self.args.output_dir)


class AmpTrainer(AmpTrainerMixin, Trainer):
    """transformers' Trainer at a level. Leave `fp16` and `bf16` out of TrainingArguments."""
