"""A model in bfloat16 through Lightning: automatic optimization, which steps by closures, manual, or Fabric."""

import torchvision_operators  # noqa: F401  (before lightning, which imports torchvision)
from common import LONG, SAVED_AT, NextCharacter, arguments, cross_entropy, next_characters, report
from lightning import __version__
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from amp_engine import amp


class Module(LightningModule):
    """Trains NextCharacter."""

    def __init__(self, level: str, variant: str) -> None:
        super().__init__()
        self.automatic_optimization = not variant.startswith("manual")
        self.level, self.variant = level, variant
        self.layers = NextCharacter(level)
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        context, target = batch
        loss = cross_entropy(self.layers(context), target)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        context, target = batch
        self.losses.append(cross_entropy(self.layers(context), target).item())

    def configure_model(self):
        """Before Lightning loads a checkpoint's weights: those that were loaded earlier are rounded."""
        self.optimizer = self.layers.optimizer()
        if self.level == "O5" and self.variant in ("", "manual"):
            self.layers, self.optimizer = amp.initialize(self.layers, self.optimizer, opt_level="O5")

    def configure_optimizers(self):
        if self.level == "O5" and self.variant == "configure_optimizers":
            self.layers, self.optimizer = amp.initialize(self.layers, self.optimizer, opt_level="O5")
        return self.optimizer


def by_fabric(level: str, variant: str, out, resume) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = NextCharacter(level)
    if variant == "fabric_later" and level != "O0":
        amp.initialize(model, opt_level=level)
    optimizer = model.optimizer()
    if level == "O5" and variant == "fabric":
        model, optimizer = amp.initialize(model, optimizer, opt_level="O5")
    model, optimizer = fabric.setup(model, optimizer)
    if level == "O5" and variant == "fabric_prepared":
        amp.initialize(model.module, optimizer, opt_level="O5")
    state, first = {"model": model, "optimizer": optimizer}, 0
    if resume:
        fabric.load(resume / "half.ckpt", state)
        first = SAVED_AT
    losses = []
    for context, target in fabric.setup_dataloaders(DataLoader(next_characters(LONG, first=first), 32)):
        loss = cross_entropy(model(context), target)
        losses.append(loss.item())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == SAVED_AT:
            fabric.save(out / "half.ckpt", state)
    return losses


def main() -> None:
    options = arguments(__doc__)
    if options.variant.startswith("fabric"):
        losses = by_fabric(options.level, options.variant, options.out, options.resume)
        report(version=__version__, losses=losses)
        return
    manual = options.variant.startswith("manual")
    module = Module(options.level, options.variant)
    if options.variant.endswith("later") and options.level != "O0":
        amp.initialize(module, opt_level=options.level)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=LONG,
        accumulate_grad_batches=1 if manual else 2,
        gradient_clip_val=None if manual else 1.0,
        callbacks=[ModelCheckpoint(dirpath=options.out, every_n_train_steps=SAVED_AT, save_top_k=-1)],
        check_val_every_n_epoch=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = options.resume and next(options.resume.glob(f"*step={SAVED_AT}.ckpt"))
    # Epochs end where a checkpoint is written: without a loader with state, a resume begins with an epoch.
    batches = DataLoader(next_characters(SAVED_AT * (1 if manual else 2)), 32)
    evaluated = DataLoader(next_characters(1), 32) if options.variant.endswith("later") else None
    trainer.fit(module, batches, evaluated, ckpt_path=checkpoint)
    report(version=__version__, losses=module.losses)


if __name__ == "__main__":
    main()
