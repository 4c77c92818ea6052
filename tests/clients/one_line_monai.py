"""A model in bfloat16 through MONAI's SupervisedTrainer, with accumulation."""

import monai
from common import LONG, SAVED_AT, NextCharacter, arguments, cross_entropy, next_characters, report
from ignite.engine import Events
from monai.engines import SupervisedTrainer
from monai.handlers import CheckpointLoader, CheckpointSaver
from torch.utils.data import DataLoader

from amp_engine import amp


def main() -> None:
    options = arguments(__doc__)
    model = NextCharacter(options.level)
    if options.variant == "later" and options.level != "O0":
        amp.initialize(model, opt_level=options.level)
    optimizer = model.optimizer()
    if options.level == "O5" and not options.variant:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O5")
    objects = {"model": model, "optimizer": optimizer}
    saver = CheckpointSaver(str(options.out), objects, epoch_level=False, save_interval=2 * SAVED_AT)
    name = f"checkpoint_iteration={2 * SAVED_AT}.pt"
    loaders = [CheckpointLoader(str(options.resume / name), objects)] if options.resume else []
    first = 2 * SAVED_AT if options.resume else 0
    trainer = SupervisedTrainer(
        device="cpu",
        max_epochs=1,
        train_data_loader=DataLoader(next_characters(2 * LONG, first=first), 32),
        network=model,
        optimizer=optimizer,
        loss_function=cross_entropy,
        accumulation_steps=2,
        decollate=False,
        train_handlers=[*loaders, saver],
    )
    losses: list[float] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append(float(engine.state.output["loss"]))
    )
    trainer.run()
    report(version=monai.__version__, losses=losses)


if __name__ == "__main__":
    main()
