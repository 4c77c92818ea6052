"""A small vision transformer on scikit-learn's digits, in the loop of timm's train.py around its ApexScaler."""

import torch
import torchvision_operators  # noqa: F401  (before timm, which imports torchvision)
from apex import amp
from common import EPS, SAVED_AT, STEPS, arguments, lower_scale, report, scaler_state
from sklearn.datasets import load_digits
from timm import __version__
from timm.models import create_model, model_parameters, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ApexScaler, CheckpointSaver, ModelEmaV2, random_seed

BATCH = 32
ACCUMULATE = 2


def main() -> None:
    options = arguments(__doc__)
    random_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1  # the pixels are 0..16
    labels = torch.from_numpy(digits.target)

    model = create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=32,
        depth=2,
        num_heads=4,
        class_token=False,
        global_pool="avg",
        weight_init="jax",
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05, eps=EPS)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.level)
    loss_scaler = ApexScaler()
    lower_scale()

    start = 0
    restored = None
    if options.resume:
        start = resume_checkpoint(
            model, str(options.resume / "last.pth.tar"), optimizer=optimizer, loss_scaler=loss_scaler
        )
        restored = scaler_state()
    ema = ModelEmaV2(model, decay=0.9)
    scheduler = CosineLRScheduler(optimizer, t_initial=2 * STEPS, warmup_t=4, warmup_lr_init=1e-4, t_in_epochs=False)
    scheduler.step_update(start)
    saver = CheckpointSaver(
        model, optimizer, model_ema=ema, amp_scaler=loss_scaler, checkpoint_dir=str(options.out), max_history=1
    )

    model.train()
    criterion = torch.nn.CrossEntropyLoss()
    losses = []
    saved = None
    for step in range(start, STEPS):
        for micro in range(ACCUMULATE):
            generator = torch.Generator().manual_seed(step * ACCUMULATE + micro)
            index = torch.randint(len(labels), (BATCH,), generator=generator)
            loss = criterion(model(images[index]), labels[index])
            losses.append(loss.item())
            loss_scaler(
                loss / ACCUMULATE,
                optimizer,
                clip_grad=1.0,
                clip_mode=options.variant or "norm",
                parameters=model_parameters(model, exclude_head=options.variant == "agc"),
                need_update=micro == ACCUMULATE - 1,
            )
        optimizer.zero_grad()
        ema.update(model)
        scheduler.step_update(step + 1)
        if step + 1 == SAVED_AT:
            saver.save_checkpoint(step)  # of epochs: here each has one step
            saved = scaler_state()
    report(version=__version__, losses=losses, saved=saved, restored=restored)


if __name__ == "__main__":
    main()
