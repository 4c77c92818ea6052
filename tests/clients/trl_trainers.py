"""A small Llama through TRL's SFTTrainer, with resume, and by variants its DPOTrainer and GRPOTrainer."""

import torch
import torchvision_operators  # noqa: F401  (before transformers, which imports torchvision)
import transformers
import trl
from amp_trainer import Scales
from common import EPS, SAVED_AT, STEPS, arguments, report, text_windows
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from amp_engine import amp
from amp_engine.integrations.transformers import AmpTrainerMixin

BATCH = 8
LENGTH = 32
LETTERS = " abcdefghijklmnopqrstuvwxyz"
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


KINDS = {"": trl.SFTTrainer, "dpo": trl.DPOTrainer, "grpo": trl.GRPOTrainer}


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each letter."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL.values(), *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **SPECIAL)


def new_model(**options) -> LlamaForCausalLM:
    transformers.set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    length = 2 * LENGTH
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(SPECIAL) + len(LETTERS), max_position_embeddings=length, **sizes, **ids, **options)
    )


def options_of(folder, **others) -> dict[str, object]:
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,  # TRL's own default casts by autocast
        "logging_steps": 1,
        "per_device_train_batch_size": BATCH,
        "disable_tqdm": True,
        "report_to": [],
        "seed": 0,
        **others,
    }


def share_of_e(completions, **others) -> list[float]:
    return [text.count("e") / LENGTH for text in completions]


def new_trainer(variant: str, kind, model, reference, options: dict[str, object], **common):
    """A trainer of the class `kind`, and its data."""
    common["processing_class"] = new_tokenizer()
    rows = options["max_steps"] * BATCH
    if variant == "dpo":
        data = Dataset.from_dict(
            {"prompt": ["the "] * rows, "chosen": ["cat sat"] * rows, "rejected": ["dog ran"] * rows}
        )
        return kind(model, reference, trl.DPOConfig(max_length=LENGTH, **options), train_dataset=data, **common)
    if variant == "grpo":
        args = trl.GRPOConfig(num_generations=BATCH, max_completion_length=LENGTH, **options)
        data = Dataset.from_dict({"prompt": ["the "] * rows})
        return kind(model, share_of_e, args, train_dataset=data, **common)
    letters = text_windows(rows, LENGTH) % len(LETTERS) + len(SPECIAL)
    args = trl.SFTConfig(max_length=LENGTH, gradient_accumulation_steps=2, **options)
    return kind(model, args, train_dataset=Dataset.from_dict({"input_ids": letters.tolist()}), **common)


def losses_of(trainer, variant: str) -> list[float]:
    """GRPO's loss is near 0 whatever is learnt, and its tokens are drawn: another level draws others."""
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return [1 - row["reward"] if variant == "grpo" else row["loss"] for row in logged]


def main() -> None:
    options = arguments(__doc__)
    scales = Scales()
    training = options_of(options.out, learning_rate=5e-3, adam_epsilon=EPS, max_steps=STEPS, save_steps=SAVED_AT)
    kind = type("AmpKind", (AmpTrainerMixin, KINDS[options.variant]), {})
    trainer = new_trainer(
        options.variant, kind, new_model(), new_model(), training, opt_level=options.level, callbacks=[scales]
    )
    trainer.train(resume_from_checkpoint=options.resume and str(options.resume / f"checkpoint-{SAVED_AT}"))
    losses = losses_of(trainer, options.variant)[SAVED_AT if options.resume else 0 :]
    trainer.save_model(str(options.out / "trained"))
    loaded = LlamaForCausalLM.from_pretrained(options.out / "trained")
    wanted = amp.export_state_dict(trainer.model, None if options.level == "O3" else torch.float32)
    assert all(torch.equal(value, wanted[name].float()) for name, value in loaded.state_dict().items())
    report(version=trl.__version__, losses=losses, saved=scales.saved, restored=scales.restored)


if __name__ == "__main__":
    main()
