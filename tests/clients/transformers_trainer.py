"""A small GPT-2 through Hugging Face's Trainer: accumulation, clipping, evaluation, the best checkpoint at the end."""

import transformers
from common import CHARACTERS, EPS, SAVED_AT, STEPS, arguments, lower_scale, report, text_windows
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

ACCUMULATE = 2
BATCH = 8
LENGTH = 32


class ScaleWriter(TrainerCallback):
    """Writes the loss scale, which the Trainer's checkpoints do not hold, once amp is initialized."""

    def on_train_begin(self, args, state, control, **kwargs):
        lower_scale()


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
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=8,
        adam_epsilon=EPS,
        max_grad_norm=1.0,
        gradient_accumulation_steps=ACCUMULATE,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        save_steps=SAVED_AT,
        eval_strategy="steps",
        eval_steps=SAVED_AT,
        load_best_model_at_end=True,
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
    losses: list[float] = []

    def record(module, inputs, output):
        if module.training:
            losses.append(output.loss.item())

    model.register_forward_hook(record)
    windows = text_windows((STEPS * ACCUMULATE + 1) * BATCH, LENGTH)
    data = [{"input_ids": window, "labels": window} for window in windows]
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data[BATCH:],
        eval_dataset=data[:BATCH],
        callbacks=[ScaleWriter()],
    )
    trainer.train(resume_from_checkpoint=options.resume and str(options.resume / f"checkpoint-{SAVED_AT}"))
    report(version=transformers.__version__, losses=losses)


if __name__ == "__main__":
    main()
