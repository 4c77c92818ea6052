"""A small GPT-2 through AmpTrainer: accumulation, clipping, a scheduler, evaluation, checkpoints, from_pretrained."""

import json

import torch
import torchvision_operators  # noqa: F401  (before transformers, which imports torchvision)
import transformers
from common import (
    CHARACTERS,
    EPS,
    RANK,
    SAVED_AT,
    STEPS,
    WORLD_SIZE,
    arguments,
    check_ranks_agree,
    lower_scale,
    report,
    scaler_state,
    text_windows,
)
from safetensors import safe_open
from torch._dynamo import OptimizedModule
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainingArguments,
)

from amp_engine import amp
from amp_engine.integrations.transformers import AmpTrainer, AmpTrainerMixin

ACCUMULATE = 2
BATCH = 8
LENGTH = 32
OF_VARIANT = {"compile": {"torch_compile": True}, "checkpointing": {"gradient_checkpointing": True}}


class Scales(TrainerCallback):
    """Writes the loss scale at the start, and reads it where a checkpoint is written and loaded."""

    def __init__(self) -> None:
        self.saved = self.restored = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            lower_scale()
        else:
            self.restored = scaler_state()

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == SAVED_AT:
            self.saved = scaler_state()


class AmpSeq2SeqTrainer(AmpTrainerMixin, Seq2SeqTrainer):
    pass


def training(folder, kind=TrainingArguments, **options) -> TrainingArguments:
    return kind(
        output_dir=str(folder),
        use_cpu=True,
        learning_rate=2e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=8,
        adam_epsilon=EPS,
        max_grad_norm=1.0,
        gradient_accumulation_steps=ACCUMULATE,
        per_device_train_batch_size=BATCH,
        logging_steps=SAVED_AT,
        disable_tqdm=True,
        report_to=[],
        seed=0,
        **{"max_steps": STEPS, "save_steps": SAVED_AT, "eval_strategy": "steps", "eval_steps": SAVED_AT, **options},
    )


def new_model() -> GPT2LMHeadModel:
    transformers.set_seed(0)
    sizes = {"vocab_size": CHARACTERS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


def data():
    windows = text_windows((STEPS * ACCUMULATE * WORLD_SIZE + 1) * BATCH, LENGTH)
    return [{"input_ids": window, "labels": window} for window in windows]


def enlarge(module, inputs, output) -> None:
    output.loss = output.loss * (1e3 if RANK == WORLD_SIZE - 1 else 1e-3)


def check_skips(level: str, folder) -> None:
    """A loss scale that is too large, for the last rank: at none do weights or scheduler move."""
    model = new_model()
    model.register_forward_hook(enlarge)
    before = [p.clone() for p in model.parameters()]
    options = {"loss_scale": 2.0**125, "skip_on_overflow": True}
    args = training(folder, max_steps=1, save_strategy="no", eval_strategy="no")
    trainer = AmpTrainer(model, args, train_dataset=data(), opt_level=level, amp_options=options)
    trainer.train()
    assert trainer.accelerator.optimizer_step_was_skipped
    assert trainer.lr_scheduler.last_epoch == 0
    assert all(torch.equal(p.to(q.dtype), q) for p, q in zip(before, model.parameters(), strict=True))
    amp.close()


def check_refusals(level: str, folder) -> None:
    message = ""
    try:
        AmpTrainer(new_model(), training(folder, bf16=True), opt_level=level)
    except ValueError as error:
        message = str(error)
    assert "bf16=False" in message, message


def check_saved(folder, model: GPT2LMHeadModel, level: str) -> None:
    """Check that the saved weights are the trained ones, in FP32, tied weights once."""
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    wanted = amp.export_state_dict(model, None if level == "O3" else torch.float32)
    for name, value in loaded.state_dict().items():
        assert value.dtype == torch.float32, name
        assert torch.equal(value, wanted[name].float()), name
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def check_saved_without_trainer(folder, model: GPT2LMHeadModel, level: str) -> None:
    """The saved model is the trained one in FP32, else rounded to the model's types; after `close` in its own type."""
    own, exact = amp.export_state_dict(model), amp.export_state_dict(model, None if level == "O3" else torch.float32)
    model.save_pretrained(folder)
    check_equal(GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32), exact)
    check_equal(GPT2LMHeadModel.from_pretrained(folder), own)
    amp.close()
    model.save_pretrained(folder)
    check_equal(GPT2LMHeadModel.from_pretrained(folder), exact)
    assert model.dtype == torch.float32


def check_equal(model: GPT2LMHeadModel, wanted) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name].to(value.dtype)), name


def main() -> None:
    options = arguments(__doc__)
    if not options.resume:
        check_skips(options.level, options.out)
        check_refusals(options.level, options.out)
    model = new_model()
    losses: list[float] = []

    @torch.compiler.disable  # the list grows with each step, and so would what is compiled
    def record(module, inputs, output):
        if module.training:
            losses.append(output.loss.item())

    model.register_forward_hook(record)
    scales = Scales()
    kind, kind_of_arguments = AmpTrainer, TrainingArguments
    if options.variant == "seq2seq":
        kind, kind_of_arguments = AmpSeq2SeqTrainer, Seq2SeqTrainingArguments
    examples = data()
    trainer = kind(
        model=model,
        args=training(
            options.out, kind_of_arguments, load_best_model_at_end=True, **OF_VARIANT.get(options.variant, {})
        ),
        train_dataset=examples[BATCH:],
        eval_dataset=examples[:BATCH],
        callbacks=[scales],
        opt_level=options.level,
    )
    trainer.train(resume_from_checkpoint=options.resume and str(options.resume / f"checkpoint-{SAVED_AT}"))
    assert isinstance(trainer.model_wrapped, OptimizedModule) == (options.variant == "compile")
    assert model.is_activation_checkpointing == (options.variant == "checkpointing")
    trainer.save_model(str(options.out / "trained"))
    if RANK == 0:
        check_saved(options.out / "trained", model, options.level)
    check_ranks_agree([*model.parameters(), *amp.master_params(trainer.optimizer)])
    assert trainer.lr_scheduler.last_epoch == STEPS
    if RANK == 0:
        check_saved_without_trainer(options.out / "plain", model, options.level)
    report(version=transformers.__version__, losses=losses, saved=scales.saved, restored=scales.restored)


if __name__ == "__main__":
    main()
