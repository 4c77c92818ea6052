"""A small convolutional classifier of scikit-learn's digits through the PyTorchClassifier of ART.

ART is the Adversarial Robustness Toolbox. The variant `adversarial` trains on examples that ART's FastGradientMethod
changes by the gradient of the input, which the classifier also takes through amp.
"""

from unittest import mock

import numpy as np
import torch
from art import __version__
from art.attacks.evasion import FastGradientMethod
from art.defences.trainer import AdversarialTrainer
from art.estimators.classification import PyTorchClassifier
from common import EPS, SAVED_AT, STEPS, arguments, digit_classifier, report
from sklearn.datasets import load_digits
from torch import nn

BATCH = 32


class Loss(nn.CrossEntropyLoss):
    """Cross entropy that remembers its last value."""

    last = float("nan")

    def forward(self, logits, labels):
        loss = super().forward(logits, labels)
        self.last = loss.item()
        return loss


def start(level: str) -> PyTorchClassifier:
    model = digit_classifier()
    # ART passes enabled=False to amp.initialize on a CPU.
    with mock.patch.object(PyTorchClassifier, "device", torch.device("cuda")):
        return PyTorchClassifier(
            model=model,
            loss=Loss(),
            input_shape=(1, 8, 8),
            nb_classes=10,
            optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, eps=EPS),
            use_amp=True,
            opt_level=level,
            loss_scale=None,
            clip_values=(0.0, 1.0),
        )


def main() -> None:
    options = arguments(__doc__)
    classifier = start(options.level)
    trainer = classifier
    if options.variant == "adversarial":
        trainer = AdversarialTrainer(classifier, FastGradientMethod(classifier, eps=0.05), ratio=0.5)
    first = 0
    if options.resume:
        first = SAVED_AT
        classifier.model.load_state_dict(torch.load(options.resume / "half.model"))
        classifier.optimizer.load_state_dict(torch.load(options.resume / "half.optimizer"))

    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    losses = []
    for step in range(first, STEPS):
        np.random.seed(step)  # AdversarialTrainer draws from it
        torch.manual_seed(step)  # fit shuffles with it
        index = np.random.randint(len(images), size=BATCH)
        trainer.fit(images[index], digits.target[index], batch_size=BATCH, nb_epochs=1)
        losses.append(classifier.loss.last)
        if step + 1 == SAVED_AT:
            classifier.save("half", path=str(options.out))
    report(version=__version__, losses=losses, saved=None, restored=None)


if __name__ == "__main__":
    main()
