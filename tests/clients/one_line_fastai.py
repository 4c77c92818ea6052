"""A model in bfloat16 through fastai's Learner, with an optimizer of torch."""

from functools import partial

import torch
import torchvision_operators  # noqa: F401  (before fastai, which imports torchvision)
from common import LONG, SAVED_AT, NextCharacter, arguments, cross_entropy, next_characters, report
from fastai import __version__
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper

from amp_engine import amp


class Records(Callback):
    """Initializes, lists the losses, and saves."""

    def __init__(self, initializes: bool) -> None:
        self.initializes = initializes
        self.losses: list[float] = []

    def before_fit(self):
        if self.initializes:
            self.learn.model, self.learn.opt.opt = amp.initialize(self.model, self.opt.opt, opt_level="O5")

    def after_batch(self):
        if self.training:
            self.losses.append(self.loss.item())
            if len(self.losses) == SAVED_AT:
                self.learn.save("half")


def main() -> None:
    options = arguments(__doc__)
    model = NextCharacter(options.level)
    if options.variant == "later" and options.level != "O0":
        amp.initialize(model, opt_level=options.level)
    records = Records(options.level == "O5" and not options.variant)
    batches = next_characters(LONG, first=SAVED_AT if options.resume else 0)
    data = DataLoaders(DataLoader(batches, bs=32), DataLoader(next_characters(1), bs=32))
    learner = Learner(
        data,
        model,
        loss_func=cross_entropy,
        opt_func=partial(OptimWrapper, opt=torch.optim.AdamW),
        lr=NextCharacter.RATE,
        wd=0.01,
        cbs=[records],
        default_cbs=True,
        path=options.out,
    )
    if options.resume:
        learner.load(options.resume / learner.model_dir / "half")
    learner.fit(1)
    report(version=__version__, losses=records.losses)


if __name__ == "__main__":
    main()
