"""A small convolutional classifier of scikit-learn's digits through Classy Vision's ClassificationTask and trainer."""

from unittest import mock

import torch
import torchvision_operators  # noqa: F401  (before Classy Vision, which imports torchvision)
from classy_vision import __version__
from classy_vision.dataset import ClassyDataset
from classy_vision.hooks import CheckpointHook, ClassyHook
from classy_vision.models import ClassyModel
from classy_vision.optim import build_optimizer, build_optimizer_schedulers
from classy_vision.tasks import ClassificationTask
from classy_vision.trainer import LocalTrainer
from common import EPS, SAVED_AT, STEPS, arguments, digit_classifier, lower_scale, report, scaler_state
from sklearn.datasets import load_digits
from torch import nn

BATCH = 16
ACCUMULATE = 2
EPOCHS = 4
SAVED_AT_EPOCH = EPOCHS * SAVED_AT // STEPS
OPTIMIZERS = {
    "": ({"name": "adamw", "eps": EPS}, 2e-3),
    "larc": ({"name": "sgd", "momentum": 0.9, "use_larc": True}, 0.03),
}


class ReadLosses(ClassyHook):
    """Reads the loss after each batch, and the scaler's state where the checkpoint is saved."""

    on_phase_start = ClassyHook._noop
    on_end = ClassyHook._noop

    def __init__(self, resumed: bool) -> None:
        super().__init__()
        self.resumed = resumed
        self.losses: list[float] = []
        self.saved = None
        self.restored = None

    def on_start(self, task):
        if self.resumed:
            self.restored = scaler_state()
        else:
            lower_scale()

    def on_step(self, task):
        self.losses.append(task.losses[-1])

    def on_phase_end(self, task):
        if task.train_phase_idx + 1 == SAVED_AT_EPOCH:
            self.saved = scaler_state()


def digits() -> ClassyDataset:
    loaded = load_digits()
    images = torch.from_numpy(loaded.images).float().unsqueeze(1) / 16
    samples = [{"input": image, "target": int(label)} for image, label in zip(images, loaded.target, strict=True)]
    dataset = ClassyDataset(
        samples[: STEPS // EPOCHS * ACCUMULATE * BATCH], BATCH, shuffle=True, transform=None, num_samples=None
    )
    dataset.set_num_workers(0)
    return dataset


def main() -> None:
    options = arguments(__doc__)
    hook = ReadLosses(options.resume is not None)
    task = ClassificationTask()
    task.set_dataset(digits(), "train")
    task.set_num_epochs(EPOCHS)
    task.set_model(ClassyModel.from_model(digit_classifier()))
    task.set_loss(nn.CrossEntropyLoss())
    optimizer, lr = OPTIMIZERS[options.variant]
    schedulers = {"lr": {"name": "linear", "start_value": lr, "end_value": lr / 2}}
    task.set_optimizer(build_optimizer(optimizer))
    task.set_optimizer_schedulers(build_optimizer_schedulers({"param_schedulers": schedulers, "num_epochs": EPOCHS}))
    task.set_clip_grad_norm(1.0)
    task.set_simulated_global_batchsize(ACCUMULATE * BATCH)
    # set_amp_args refuses amp without CUDA.
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        task.set_amp_args({"opt_level": options.level})
    task.set_hooks([hook, CheckpointHook(str(options.out))])
    if options.resume:
        task.set_checkpoint(str(options.resume / CheckpointHook.get_checkpoint_name(SAVED_AT_EPOCH - 1)))
    LocalTrainer().train(task)
    report(version=__version__, losses=hook.losses, saved=hook.saved, restored=hook.restored)


if __name__ == "__main__":
    main()
