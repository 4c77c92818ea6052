"""A small vision transformer on scikit-learn's digits, in the loop of timm's train.py around a scaler.

That is timm's ApexScaler, or `amp_engine.integrations.timm.AmpScaler` in the place of NativeScaler.
"""

import torch
import torchvision_operators  # noqa: F401  (before timm, which imports torchvision)
from common import EPS, SAVED_AT, STEPS, arguments, lower_scale, report, scaler_state
from sklearn.datasets import load_digits
from timm import __version__
from timm.models import create_model, model_parameters, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ApexScaler, CheckpointSaver, ModelEmaV2, NativeScaler, random_seed

from amp_engine import amp
from amp_engine.integrations.timm import AmpScaler

BATCH = 32
ACCUMULATE = 2
VARIANTS = {
    "": (ApexScaler, "norm", 1.0),
    "agc": (ApexScaler, "agc", 1.0),
    "scaler_norm": (AmpScaler, "norm", 1.0),
    "scaler_value": (AmpScaler, "value", 0.01),
    "scaler_agc": (AmpScaler, "agc", 0.02),
}


def new_model() -> torch.nn.Module:
    random_seed(0)
    return create_model(
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


def start(level: str, **options):
    model = new_model()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05, eps=EPS)
    return amp.initialize(model, optimizer, opt_level=level, **options)


def data():
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1  # the pixels are 0..16
    return images, torch.from_numpy(digits.target)


def drawn(images, labels, seed: int):
    """A batch."""
    index = torch.randint(len(labels), (BATCH,), generator=torch.Generator().manual_seed(seed))
    return images[index], labels[index]


def train(level: str, variant: str, out, resume=None) -> dict:
    """The record of a run, from the start or from the checkpoint in the folder `resume`."""
    kind, clip_mode, clip_grad = VARIANTS[variant]
    images, labels = data()
    model, optimizer = start(level)
    loss_scaler = kind()
    lower_scale()

    first = 0
    restored = None
    if resume:
        first = resume_checkpoint(model, str(resume / "last.pth.tar"), optimizer=optimizer, loss_scaler=loss_scaler)
        restored = scaler_state()
    ema = ModelEmaV2(model, decay=0.9)
    scheduler = CosineLRScheduler(optimizer, t_initial=2 * STEPS, warmup_t=4, warmup_lr_init=1e-4, t_in_epochs=False)
    scheduler.step_update(first)
    saver = CheckpointSaver(
        model, optimizer, model_ema=ema, amp_scaler=loss_scaler, checkpoint_dir=str(out), max_history=1
    )

    model.train()
    criterion = torch.nn.CrossEntropyLoss()
    losses = []
    saved = None
    for step in range(first, STEPS):
        for micro in range(ACCUMULATE):
            image, label = drawn(images, labels, step * ACCUMULATE + micro)
            loss = criterion(model(image), label)
            losses.append(loss.item())
            loss_scaler(
                loss / ACCUMULATE,
                optimizer,
                clip_grad=clip_grad,
                clip_mode=clip_mode,
                parameters=model_parameters(model, exclude_head=clip_mode == "agc"),
                need_update=micro == ACCUMULATE - 1,
            )
        optimizer.zero_grad()
        ema.update(model)
        scheduler.step_update(step + 1)
        if step + 1 == SAVED_AT:
            saver.save_checkpoint(step)  # of epochs: here each has one step
            saved = scaler_state()
    return {"losses": losses, "saved": saved, "restored": restored}


def check_resumes(level: str, folder, whole: dict) -> None:
    """A run from the checkpoint of AmpScaler repeats the losses, bit for bit, from the same loss scale."""
    amp.close()
    again = train(level, "scaler_norm", folder, resume=folder)
    assert again["losses"] == whole["losses"][SAVED_AT * ACCUMULATE :]
    assert again["restored"] == whole["saved"]


def check_skips(level: str) -> None:
    """A loss scale that is too large for one of two backwards: no weight moves."""
    model, optimizer = start(level, loss_scale=2.0**125, skip_on_overflow=True)
    before = [p.detach().clone() for p in model.parameters()]
    images, labels = data()
    loss_scaler = AmpScaler()
    for factor in (1e3, 1e-3):
        loss = torch.nn.functional.cross_entropy(model(images[:BATCH]), labels[:BATCH]) * factor
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=factor < 1)
    assert all(map(torch.equal, before, model.parameters()))
    assert amp.last_step(optimizer).skipped
    amp.close()


def check_is_in_place_of_native() -> None:
    assert issubclass(AmpScaler, NativeScaler)
    assert AmpScaler(device="cpu").state_dict_key == NativeScaler.state_dict_key


def main() -> None:
    options = arguments(__doc__)
    if options.variant == "scaler_norm":
        check_is_in_place_of_native()
        check_skips(options.level)
    record = train(options.level, options.variant, options.out, options.resume)
    if options.variant == "scaler_norm":
        check_resumes(options.level, options.out, record)
    report(version=__version__, **record)


if __name__ == "__main__":
    main()
