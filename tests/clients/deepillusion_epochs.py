"""A small convolutional classifier of scikit-learn's digits through deepillusion's adversarial_epoch for amp.

Its FGSM for amp changes each batch by the gradient of the input. deepillusion writes no checkpoint: the one here is the
program's, with amp's state.
"""

from unittest import mock

import torch
from common import EPS, SAVED_AT, STEPS, arguments, digit_classifier, lower_scale, report, scaler_state
from deepillusion.torchattacks.amp import FGSM, __version__
from deepillusion.torchdefenses.amp import adversarial_epoch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Subset, TensorDataset

from amp_engine import amp

BATCH = 16  # FGSM sums the loss of a batch: at 32, gradients overflow at the scale of lower_scale


def main() -> None:
    options = arguments(__doc__)
    model = digit_classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=EPS)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.level)
    lower_scale()
    attack = {
        "attack": FGSM,
        "attack_args": {
            "data_params": {"x_min": 0.0, "x_max": 1.0},
            "attack_params": {"norm": "inf", "eps": 0.02},
            "optimizer": optimizer,
        },
    }

    first = 0
    saved = restored = None
    if options.resume:
        checkpoint = torch.load(options.resume / "half.pt")
        first = SAVED_AT
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
        restored = scaler_state()

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    data = TensorDataset(images, torch.from_numpy(digits.target))
    losses = []
    for step in range(first, STEPS):
        index = torch.randint(len(data), (BATCH,), generator=torch.Generator().manual_seed(step))
        loader = DataLoader(Subset(data, index.tolist()), BATCH)
        # FGSM casts the logits to torch.cuda.DoubleTensor on every device.
        with mock.patch.object(torch.cuda, "DoubleTensor", torch.DoubleTensor):
            loss, _accuracy = adversarial_epoch(model, loader, optimizer, adversarial_args=attack)
        losses.append(loss)
        if step + 1 == SAVED_AT:
            saved = scaler_state()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
            torch.save(state, options.out / "half.pt")
    report(version=__version__, losses=losses, saved=saved, restored=restored)


if __name__ == "__main__":
    main()
