"""A small transformer classifier through mmengine's Runner and ApexOptimWrapper."""

import mmengine
import torch.nn.functional as F
from common import CHARACTERS, EPS, SAVED_AT, STEPS, arguments, lower_scale, report, scaler_state, text_windows
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner, set_random_seed
from torch import nn

BATCH = 32
ACCUMULATE = 2
CONTEXT = 8


class NextCharacter(BaseModel):
    """Predicts a character from the CONTEXT before it."""

    def __init__(self, resumed: bool) -> None:
        super().__init__()
        self.resumed = resumed
        self.restored = None
        self.embedding = nn.Embedding(CHARACTERS, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32 * CONTEXT, CHARACTERS)
        self.losses: list[float] = []

    def forward(self, context, target, mode="tensor"):
        logits = self.head(self.layer(self.embedding(context)).flatten(1))
        if mode != "loss":
            return logits
        if not self.losses:  # the wrapper initializes amp in the first iteration
            if self.resumed:
                self.restored = scaler_state()
            else:
                lower_scale()
        loss = F.cross_entropy(logits.float(), target)
        self.losses.append(loss.item())
        return {"loss": loss}


class ReadScaler(Hook):
    """Reads the scaler's state where the first checkpoint is saved."""

    saved = None

    def before_save_checkpoint(self, runner, checkpoint):
        self.saved = self.saved or scaler_state()


def main() -> None:
    options = arguments(__doc__)
    set_random_seed(0)
    model = NextCharacter(options.resume is not None)
    hook = ReadScaler()
    windows = text_windows(STEPS * ACCUMULATE * BATCH, CONTEXT + 1)
    runner = Runner(
        model=model,
        work_dir=str(options.out),
        train_dataloader={
            "dataset": [(w[:-1], w[-1]) for w in windows],
            "batch_size": BATCH,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "collate_fn": {"type": "default_collate"},
        },
        train_cfg={"by_epoch": False, "max_iters": STEPS * ACCUMULATE},
        optim_wrapper={
            "type": "ApexOptimWrapper",
            "opt_level": options.level,
            "optimizer": {"type": "AdamW", "lr": 2e-3, "eps": EPS},
            "accumulative_counts": ACCUMULATE,
            "clip_grad": {"max_norm": 1.0},
        },
        param_scheduler={"type": "LinearLR", "start_factor": 1.0, "end_factor": 0.5, "by_epoch": False},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": SAVED_AT * ACCUMULATE, "by_epoch": False}},
        custom_hooks=[hook],
        load_from=options.resume and str(options.resume / f"iter_{SAVED_AT * ACCUMULATE}.pth"),
        resume=options.resume is not None,
        randomness={"seed": 0},
    )
    runner.train()
    report(version=mmengine.__version__, losses=model.losses, saved=hook.saved, restored=model.restored)


if __name__ == "__main__":
    main()
