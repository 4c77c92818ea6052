"""A small vision transformer in bfloat16 in the loop of timm's train.py, without a scaler, and its ModelEmaV2."""

import torch
import torchvision_operators  # noqa: F401  (before timm, which imports torchvision)
from common import LONG, SAVED_AT, arguments, cross_entropy, in_bfloat16, report
from timm import __version__
from timm.models import load_checkpoint, model_parameters, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver, ModelEmaV2
from timm.utils.clip_grad import dispatch_clip_grad
from timm_scaler import ACCUMULATE, data, drawn, new_model

from amp_engine import amp

RATE = 4e-4


def main() -> None:
    options = arguments(__doc__)
    model = new_model()
    for param in model.parameters():  # so large that steps of RATE are too small for bfloat16
        param.data *= 2
    in_bfloat16(model, options.level)
    dtype = next(model.parameters()).dtype
    average = ModelEmaV2(model, decay=0.9)
    if options.level in ("O4", "O5"):
        average.float()
        amp.initialize(model, opt_level=options.level)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=RATE, weight_decay=0.05)
    saver = CheckpointSaver(model, optimizer, model_ema=average, checkpoint_dir=str(options.out), max_history=1)
    first = 0
    if options.resume:
        path = str(options.resume / "last.pth.tar")
        first = resume_checkpoint(model, path, optimizer=optimizer)
        load_checkpoint(average.module, path, use_ema=True)
    images, labels = data()
    model.train()
    losses = []
    for step in range(first, LONG):
        for micro in range(ACCUMULATE):
            image, label = drawn(images.to(dtype), labels, step * ACCUMULATE + micro)
            loss = cross_entropy(model(image), label)
            losses.append(loss.item())
            (loss / ACCUMULATE).backward()
        dispatch_clip_grad(model_parameters(model), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
        if step + 1 == SAVED_AT:
            saver.save_checkpoint(step)  # of epochs: here each has one step
    with torch.no_grad():  # the losses of the average
        for seed in range(8):
            image, label = drawn(images, labels, seed)
            losses.append(cross_entropy(average.module(image.to(next(average.parameters()).dtype)), label).item())
    report(version=__version__, losses=losses)


if __name__ == "__main__":
    main()
