"""A model in bfloat16 through skorch, which steps by closures."""

import skorch
import torch
from common import LONG, SAVED_AT, NextCharacter, arguments, next_characters, report
from skorch import NeuralNet
from skorch.callbacks import Callback

from amp_engine import amp


class CrossEntropy(torch.nn.CrossEntropyLoss):
    """In FP32, also of logits in bfloat16."""

    def forward(self, input, target):
        return super().forward(input.float(), target)


class Records(Callback):
    """Initializes, lists the losses, and saves."""

    def __init__(self, initializes: bool, out) -> None:
        self.initializes, self.out = initializes, out
        self.losses: list[float] = []

    def on_train_begin(self, net, **kwargs):
        if self.initializes:
            net.module_, net.optimizer_ = amp.initialize(net.module_, net.optimizer_, opt_level="O5")

    def on_batch_end(self, net, loss, training, **kwargs):
        self.losses.append(loss.item())
        if len(self.losses) == SAVED_AT:
            net.save_params(**files(self.out))


def files(folder) -> dict[str, str]:
    return {"f_params": str(folder / "model.pt"), "f_optimizer": str(folder / "optimizer.pt")}


def main() -> None:
    options = arguments(__doc__)
    model = NextCharacter(options.level)
    if options.variant == "later" and options.level != "O0":
        amp.initialize(model, opt_level=options.level)
    records = Records(options.level == "O5" and not options.variant, options.out)
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
    net.initialize()
    if options.resume:
        net.load_params(**files(options.resume))
    net.partial_fit(next_characters(LONG, first=SAVED_AT if options.resume else 0), y=None)
    report(version=skorch.__version__, losses=records.losses)


if __name__ == "__main__":
    main()
