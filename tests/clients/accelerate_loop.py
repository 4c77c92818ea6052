"""A character model through Accelerate's own loop: accumulation, clipping, a scheduler, save_state and load_state."""

import accelerate
import torch
import torch.nn.functional as F
from accelerate import Accelerator
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
from torch import nn
from torch.utils.data import DataLoader

from amp_engine import amp
from amp_engine.integrations.accelerate import use

ACCUMULATE = 2
BATCH = 16
CONTEXT = 8


class Loop:
    """Everything that Accelerate prepares, at one level."""

    def __init__(self, level: str, **options) -> None:
        torch.manual_seed(0)
        self.accelerator = use(
            Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE), opt_level=level, **options
        )
        model = nn.Sequential(
            nn.Embedding(CHARACTERS, 16),
            nn.Flatten(),
            nn.Linear(16 * CONTEXT, 64),
            nn.LayerNorm(64),
            nn.GELU(),
            nn.Linear(64, CHARACTERS),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=EPS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS * WORLD_SIZE))
        batches = DataLoader(text_windows(STEPS * ACCUMULATE * BATCH * WORLD_SIZE, CONTEXT + 1), BATCH)
        self.model, self.optimizer, self.scheduler, self.batches = self.accelerator.prepare(
            model, optimizer, scheduler, batches
        )

    def iterate(self, batch, clip: str = "norm", factor: float = 1.0) -> float:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(batch[:, :-1]), batch[:, -1])
            accelerator.backward(loss * factor)
            if accelerator.sync_gradients and clip == "value":
                accelerator.clip_grad_value_(self.model.parameters(), 0.01)
            elif accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.item()


def check_skips(level: str) -> None:
    """A loss scale that is too large, for the last rank: at none do weights or scheduler move."""
    loop = Loop(level, loss_scale=2.0**125, skip_on_overflow=True)
    before = [p.clone() for p in loop.model.parameters()]
    for batch, _ in zip(loop.batches, range(ACCUMULATE), strict=False):
        loop.iterate(batch, factor=1e3 if RANK == WORLD_SIZE - 1 else 1e-3)
    assert loop.accelerator.optimizer_step_was_skipped
    assert loop.scheduler.scheduler.last_epoch == 0
    assert all(map(torch.equal, before, loop.model.parameters()))
    amp.close()


def main() -> None:
    options = arguments(__doc__)
    if not options.resume:
        check_skips(options.level)
    loop = Loop(options.level)
    lower_scale()
    start, restored, saved = 0, None, None
    if options.resume:
        loop.accelerator.load_state(str(options.resume / "state"))
        start, restored = SAVED_AT, scaler_state()
    losses = []
    batches = loop.accelerator.skip_first_batches(loop.batches, start * ACCUMULATE)
    for index, batch in enumerate(batches, start * ACCUMULATE):
        losses.append(loop.iterate(batch, options.variant or "norm"))
        if index + 1 == SAVED_AT * ACCUMULATE:
            loop.accelerator.save_state(str(options.out / "state"))
            saved = scaler_state()
    assert loop.scheduler.scheduler.last_epoch == STEPS * WORLD_SIZE  # a step of Accelerate's is one for each rank
    check_ranks_agree([*loop.model.parameters(), *amp.master_params(loop.optimizer)])
    report(version=accelerate.__version__, losses=losses, saved=saved, restored=restored)


if __name__ == "__main__":
    main()
