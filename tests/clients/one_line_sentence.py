"""A BERT in bfloat16 through sentence-transformers' trainer: it learns which words stand in one window of a text."""

import torch
import torchvision_operators  # noqa: F401  (before transformers, which imports torchvision)
from common import LONG, arguments, report, text_windows
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, __version__
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.sentence_transformer.training_args import SentenceTransformerTrainingArguments
from transformers import BertConfig, BertModel, BertTokenizerFast

from amp_engine import amp

BATCH = 16
LENGTH = 160
RATE = 5e-4


def texts(count: int) -> list[list[str]]:
    """Two parts of each window."""
    windows = ["".join(map(chr, window)).split() for window in text_windows(count, LENGTH).tolist()]
    return [[" ".join(words[::2]), " ".join(words[1::2])] for words in windows]


def new_model(level: str, folder, vocabulary: list[str]) -> SentenceTransformer:
    """Load a model in bfloat16; at O0 and O4 the same weights in FP32."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.25,
    )
    BertModel(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    dtype = torch.float32 if level in ("O0", "O4") else torch.bfloat16
    words = Transformer(str(folder), model_kwargs={"dtype": dtype})
    return SentenceTransformer(modules=[words, Pooling(64)], device="cpu")


def main() -> None:
    options = arguments(__doc__)
    pairs = texts(LONG * BATCH)
    words = sorted({word for pair in pairs for text in pair for word in text.lower().split() if word.isalpha()})
    model = new_model(options.level, options.out / "bert", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    optimizer = None
    if options.variant == "later":
        if options.level != "O0":
            amp.initialize(model, opt_level=options.level)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        if options.level == "O5":
            model, optimizer = amp.initialize(model, optimizer, opt_level="O5")
    loss = MultipleNegativesRankingLoss(model)
    losses: list[float] = []
    loss.register_forward_hook(lambda module, inputs, output: losses.append(output.item()))
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(options.out),
            use_cpu=True,
            max_steps=LONG,
            learning_rate=RATE,
            per_device_train_batch_size=BATCH,
            lr_scheduler_type="constant",
            save_strategy="no",
            disable_tqdm=True,
            report_to=[],
            seed=0,
        ),
        train_dataset=Dataset.from_dict(
            dict(zip(("anchor", "positive"), map(list, zip(*pairs, strict=True)), strict=True))
        ),
        loss=loss,
        optimizers=(optimizer, None),
    )
    trainer.train()
    report(version=__version__, losses=losses)


if __name__ == "__main__":
    main()
