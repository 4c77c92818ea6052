"""A model in bfloat16 through skorch, which steps by closures."""

import skorch
import torch
from common import LONG, NextCharacter, arguments, next_characters, report
from skorch import NeuralNet
from skorch.callbacks import Callback

from amp_engine import amp


class CrossEntropy(torch.nn.CrossEntropyLoss):
    """In FP32, also of logits in bfloat16."""

    def forward(self, input, target):
        return super().forward(input.float(), target)


class Records(Callback):
    """Initializes, and lists the losses."""

    def __init__(self, initializes: bool) -> None:
        self.initializes = initializes
        self.losses: list[float] = []

    def on_train_begin(self, net, **kwargs):
        if self.initializes:
            net.module_, net.optimizer_ = amp.initialize(net.module_, net.optimizer_, opt_level="O5")

    def on_batch_end(self, net, loss, training, **kwargs):
        self.losses.append(loss.item())


def main() -> None:
    options = arguments(__doc__)
    model = NextCharacter(options.level)
    if options.variant == "later" and options.level != "O0":
        amp.initialize(model, opt_level=options.level)
    records = Records(options.level == "O5" and not options.variant)
    net = NeuralNet(
        model,
        criterion=CrossEntropy,
        optimizer=torch.optim.AdamW,
        lr=NextCharacter.RATE,
        batch_size=32,
        max_epochs=1,
        train_split=None,
        callbacks=[records],
        verbose=0,
    )
    net.fit(next_characters(LONG), y=None)
    report(version=skorch.__version__, losses=records.losses)


if __name__ == "__main__":
    main()
