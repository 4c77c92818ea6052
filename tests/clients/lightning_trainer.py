"""A character model with batch norm through pytorch-lightning's Trainer, with automatic or manual optimization."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from apex import amp
from common import CHARACTERS, EPS, SAVED_AT, STEPS, arguments, lower_scale, report, scaler_state, text_windows
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

BATCH = 32
CONTEXT = 8


class ApexOnCPU(Accelerator):
    """The CPU, by another name: Trainer(accelerator="cpu") refuses apex."""

    @staticmethod
    def parse_devices(devices):
        return devices

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("cpu")] * devices

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return True

    def setup_device(self, device):
        pass

    def teardown(self):
        pass


class NextCharacter(pl.LightningModule):
    """Predicts a character from the CONTEXT before it."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.layers = nn.Sequential(
            nn.Embedding(CHARACTERS, 16),
            nn.Flatten(),
            nn.Linear(16 * CONTEXT, 64),
            nn.BatchNorm1d(64),
            nn.GELU(),
            nn.Linear(64, CHARACTERS),
        )
        self.losses: list[float] = []
        self.saved = self.restored = self.scaler = None

    def forward(self, context):
        return self.layers(context)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[:, :-1]), batch[:, -1])
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, eps=EPS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_start(self):
        lower_scale()
        if self.scaler is not None:
            amp.load_state_dict(self.scaler)
            self.restored = scaler_state()

    def on_save_checkpoint(self, checkpoint):
        if self.trainer.global_step == SAVED_AT:
            self.saved = scaler_state()

    def on_load_checkpoint(self, checkpoint):
        # The plugin saves amp's state and refuses to train on once it is given it back. It is loaded above instead.
        self.scaler = checkpoint.pop("ApexMixedPrecisionPlugin")


def main() -> None:
    options = arguments(__doc__)
    pl.seed_everything(0)
    manual = options.variant == "manual"
    model = NextCharacter(manual)
    trainer = pl.Trainer(
        accelerator=ApexOnCPU(),
        devices=1,
        precision=16,
        amp_backend="apex",
        amp_level=options.level,
        max_steps=STEPS,
        gradient_clip_val=None if manual else 1.0,
        callbacks=[ModelCheckpoint(dirpath=options.out, every_n_train_steps=SAVED_AT, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = DataLoader(text_windows(SAVED_AT * BATCH, CONTEXT + 1), BATCH)
    checkpoint = options.resume and next(options.resume.glob(f"*step={SAVED_AT}.ckpt"))
    trainer.fit(model, batches, ckpt_path=checkpoint)
    report(version=pl.__version__, losses=model.losses, saved=model.saved, restored=model.restored)


if __name__ == "__main__":
    main()
