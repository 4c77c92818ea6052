"""A small GPT-2 through Hugging Face's Trainer: gradient accumulation, clipping, a checkpoint of the Trainer's own."""

import transformers
from common import CHARACTERS, SAVED_AT, STEPS, arguments, lower_scale, report, scaler_state, text_windows
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

ACCUMULATE = 2
BATCH = 8
LENGTH = 32


class ScaleWriter(TrainerCallback):
    """Writes the loss scale once amp is initialized, and reads it back where the checkpoint is."""

    saved = None

    def on_train_begin(self, args, state, control, **kwargs):
        lower_scale()

    def on_save(self, args, state, control, **kwargs):
        self.saved = scaler_state()


def main() -> None:
    options = arguments(__doc__)
    training = TrainingArguments(
        output_dir=str(options.out),
        use_cpu=True,
        fp16=True,
        half_precision_backend="apex",
        fp16_opt_level=options.level,
        optim=options.variant or "adamw_torch",
        learning_rate=2e-3,
        max_grad_norm=1.0,
        gradient_accumulation_steps=ACCUMULATE,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        save_steps=SAVED_AT,
        logging_steps=SAVED_AT,
        disable_tqdm=True,
        report_to=[],
        seed=0,
    )
    transformers.set_seed(0)
    config = GPT2Config(
        vocab_size=CHARACTERS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    losses = []
    model.register_forward_hook(lambda module, inputs, output: losses.append(output.loss.item()))
    windows = text_windows(STEPS * ACCUMULATE * BATCH, LENGTH)
    scale = ScaleWriter()
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=[{"input_ids": window, "labels": window} for window in windows],
        callbacks=[scale],
    )
    trainer.train(resume_from_checkpoint=options.resume and str(options.resume / f"checkpoint-{SAVED_AT}"))
    report(version=transformers.__version__, losses=losses)


if __name__ == "__main__":
    main()
