"""Hugging Face transformers: `AmpTrainer(model, args, ..., opt_level="O2")` in place of `Trainer(model, args, ...)`."""

from __future__ import annotations

from typing import Any

from amp_engine import amp
from amp_engine.integrations.extras import needs

with needs("transformers"):
    import accelerate  # noqa: F401  # before our module for it, which would name its own extra
    from transformers import Trainer

    from amp_engine.integrations.accelerate import use


class AmpTrainerMixin:
    """Trains a Trainer, or a subclass, at a level: `class Mine(AmpTrainerMixin, Seq2SeqTrainer): pass`.

    It saves FP32, so that training resumes exactly; `from_pretrained` loads the type that the model had before
    training.

    Args:
        args, kwargs: of the Trainer.
        opt_level: the level, as in `amp.initialize`.
        amp_options: further arguments of `amp.initialize`.
    """

    accelerator: Any
    args: Any
    model: Any

    def __init__(
        self, *args: Any, opt_level: str = "O1", amp_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._amp_options = {"opt_level": opt_level, **(amp_options or {})}
        super().__init__(*args, **kwargs)
        self._came_in = getattr(self.model, "dtype", None)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; see transformers."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = use(self.accelerator, **self._amp_options)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._load_from_checkpoint(checkpoint)  # type: ignore[attr-defined]  # again, now that there are masters
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the loss scale and the skips beside the training loss; see transformers."""
        if amp.current_engine() is not None and "loss" in logs:
            logs = {**logs, **amp.scalars()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        if self.args.should_save and getattr(self.model, "dtype", None) != self._came_in:
            self.model.config.update({"dtype": str(self._came_in).removeprefix("torch.")})
            self.model.config.save_pretrained(output_dir or self.args.output_dir)


class AmpTrainer(AmpTrainerMixin, Trainer):
    """transformers' Trainer at a level. Leave `fp16` and `bf16` out of TrainingArguments."""
