"""A GPT-2 in bfloat16 through Hugging Face's Trainer: accumulation, clipping, a scheduler, checkpoints."""

import torch
import torchvision_operators  # noqa: F401  (before transformers, which imports torchvision)
import transformers
from common import (
    CHARACTERS,
    LONG,
    OVERFLOWS_AT,
    SAVED_AT,
    WORLD_SIZE,
    arguments,
    check_ranks_agree,
    in_bfloat16,
    overflow,
    report,
    text_windows,
)
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from amp_engine import amp

ACCUMULATE = 2
BATCH = 8
LENGTH = 32
RATE = 5e-4


class Creates(Trainer):
    """Initializes where the Trainer makes its optimizer."""

    def create_optimizer(self, model=None):
        super().create_optimizer()
        self.model, self.optimizer = amp.initialize(self.model, self.optimizer, opt_level="O5")
        return self.optimizer


class Initializes(TrainerCallback):
    """Initializes the optimizer that the Trainer has made and Accelerate has wrapped."""

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
        model, optimizer = amp.initialize(model, optimizer, opt_level="O5")


class Overflows(TrainerCallback):
    """Makes the gradients of one step infinite."""

    def __init__(self, level: str) -> None:
        self.level = level

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if state.global_step == OVERFLOWS_AT:
            overflow(model, self.level)


def new_model(level: str) -> GPT2LMHeadModel:
    transformers.set_seed(0)
    sizes = {"vocab_size": CHARACTERS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0, initializer_range=0.25))
    return in_bfloat16(model, level)


def main() -> None:
    options = arguments(__doc__)
    training = TrainingArguments(
        output_dir=str(options.out),
        use_cpu=True,
        learning_rate=RATE,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        gradient_accumulation_steps=ACCUMULATE,
        per_device_train_batch_size=BATCH,
        max_steps=LONG,
        save_steps=SAVED_AT,
        logging_steps=SAVED_AT,
        eval_strategy="steps" if options.variant.endswith("later") else "no",
        eval_steps=OVERFLOWS_AT,
        disable_tqdm=True,
        report_to=[],
        seed=0,
    )
    model = new_model(options.level)
    kind, callbacks, optimizers = Trainer, [], (None, None)
    if options.level == "O5" and options.variant == "create_optimizer":
        kind = Creates
    elif options.level == "O5" and options.variant == "callback":
        callbacks = [Initializes()]
    elif options.variant.endswith("later"):
        callbacks = [Overflows(options.level)]
        if options.level != "O0":
            amp.initialize(model, opt_level=options.level)
    elif not options.variant:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        if options.level == "O5":
            model, optimizer = amp.initialize(model, optimizer, opt_level="O5")
        optimizers = (optimizer, None)
    losses: list[float] = []
    model.register_forward_hook(lambda module, inputs, output: losses.append(output.loss.item()))
    windows = text_windows(LONG * ACCUMULATE * BATCH * WORLD_SIZE, LENGTH)
    data = [{"input_ids": window, "labels": window} for window in windows]
    trainer = kind(
        model,
        training,
        train_dataset=data,
        eval_dataset=data[: BATCH * WORLD_SIZE],
        callbacks=callbacks,
        optimizers=optimizers,
    )
    trainer.train(resume_from_checkpoint=options.resume and str(options.resume / f"checkpoint-{SAVED_AT}"))
    check_ranks_agree(model.state_dict().values())
    report(version=transformers.__version__, losses=losses)


if __name__ == "__main__":
    main()
