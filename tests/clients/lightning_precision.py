"""A character model with batch norm through Lightning 2: automatic or manual optimization, or Fabric."""

import torch
import torch.nn.functional as F
import torchvision_operators  # noqa: F401  (before lightning, which imports torchvision)
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
from lightning import __version__
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from amp_engine import amp
from amp_engine.integrations.lightning import AmpFabricPrecision, AmpPrecision

ACCUMULATE = 2
BATCH = 32
CONTEXT = 8


def counted(calls, bucket):  # torch looks at annotations, and takes no text
    """A communication hook that lists its buckets."""
    calls.append(bucket.index())
    return allreduce_hook(torch.distributed.group.WORLD, bucket)


class SmallBuckets(DDPStrategy):
    """Lightning's strategy with options of its wrapper; of itself it registers hooks on GPUs only."""

    def __init__(self) -> None:
        super().__init__(bucket_cap_mb=0.01, gradient_as_bucket_view=True)
        self.calls: list[int] = []

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook(self.calls, counted)

    def check(self) -> None:
        """The wrapper that trained has the options, and the hook was called for several buckets."""
        assert isinstance(self.model, DistributedDataParallel)
        assert self.model.bucket_bytes_cap == int(0.01 * 1024 * 1024)
        assert self.model.gradient_as_bucket_view
        assert len(self.calls) >= STEPS
        assert max(self.calls) > 0


class NextCharacter(LightningModule):
    """Predicts a character from the CONTEXT before it."""

    def __init__(self, manual: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.factor = factor  # of the loss, which overflows by it
        self.layers = nn.Sequential(
            nn.Embedding(CHARACTERS, 16),
            nn.Flatten(),
            nn.Linear(16 * CONTEXT, 64),
            nn.BatchNorm1d(64),
            nn.GELU(),
            nn.Linear(64, CHARACTERS),
        )
        self.losses: list[float] = []
        self.saved = self.restored = None

    def forward(self, context):
        return self.layers(context)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[:, :-1]), batch[:, -1])
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
            optimizer.step()
        return loss * self.factor

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, eps=EPS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        amp.step_scheduler(scheduler)

    def on_train_start(self):
        if self.trainer.global_step == 0:
            lower_scale()
        else:
            self.restored = scaler_state()

    def on_train_end(self):
        if WORLD_SIZE > 1 and self.trainer.global_step == STEPS:
            self.trainer.strategy.check()
        check_ranks_agree([*self.parameters(), *amp.master_params(self.optimizers().optimizer)])

    def on_save_checkpoint(self, checkpoint):
        if self.trainer.global_step == SAVED_AT:
            self.saved = scaler_state()


def trainer_of(level: str, steps: int, manual: bool = False, callbacks=(), **options) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=SmallBuckets() if WORLD_SIZE > 1 else "auto",
        plugins=AmpPrecision(level, **options),
        max_steps=steps,
        accumulate_grad_batches=1 if manual else ACCUMULATE,
        gradient_clip_val=None if manual else 1.0,
        callbacks=[*callbacks],
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def batches() -> DataLoader:
    return DataLoader(text_windows(SAVED_AT * ACCUMULATE * BATCH * WORLD_SIZE, CONTEXT + 1), BATCH)


def check_skips(level: str) -> None:
    """A loss scale that is too large, for the last rank: at none do weights or scheduler move; the model is FP32 again.

    At O3, which has no masters, it comes back as it was rounded, and so it does where masters of ranks start.
    """
    model = NextCharacter(factor=1e3 if RANK == WORLD_SIZE - 1 else 1e-3)
    masters = {"O2": torch.float16, "O5": torch.bfloat16} if WORLD_SIZE > 1 else {}
    dtype = {"O3": torch.float16, **masters}.get(level, torch.float32)
    before = [p.detach().to(dtype, copy=True).float() for p in model.parameters()]
    trainer = trainer_of(level, 1, loss_scale=2.0**125, skip_on_overflow=True)
    trainer.fit(model, batches())
    schedulers = trainer.lr_scheduler_configs
    assert [config.scheduler.last_epoch for config in schedulers] == [0]
    assert all(map(torch.equal, before, model.parameters()))


def by_fabric(level: str) -> list[float]:
    """Fabric's own loop, of as many steps."""
    fabric = Fabric(accelerator="cpu", devices=1, plugins=AmpFabricPrecision())
    model = NextCharacter().layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=EPS)
    amp.initialize(model, optimizer, opt_level=level)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for batch in fabric.setup_dataloaders(batches()):
        loss = F.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        losses.append(loss.item())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    options = arguments(__doc__)
    seed_everything(0)
    if options.variant == "fabric":
        report(version=__version__, losses=by_fabric(options.level))
        return
    if not options.resume:
        check_skips(options.level)
    seed_everything(0)
    manual = options.variant == "manual"
    model = NextCharacter(manual)
    files = ModelCheckpoint(dirpath=options.out, every_n_train_steps=SAVED_AT, save_top_k=-1)
    trainer = trainer_of(options.level, STEPS, manual, [files])
    checkpoint = options.resume and next(options.resume.glob(f"*step={SAVED_AT}.ckpt"))
    trainer.fit(model, batches(), ckpt_path=checkpoint, weights_only=False)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    report(version=__version__, losses=model.losses, saved=model.saved, restored=model.restored)


if __name__ == "__main__":
    main()
