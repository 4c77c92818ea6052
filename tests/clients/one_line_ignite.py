"""A model in bfloat16 through ignite's supervised trainer."""

import ignite
from common import LONG, SAVED_AT, NextCharacter, arguments, cross_entropy, next_characters, report
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import Checkpoint
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
    trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    objects = {"trainer": trainer, "model": model, "optimizer": optimizer}
    saves = Checkpoint(objects, str(options.out), filename_pattern="half.pt")
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=SAVED_AT), saves)
    if options.resume:
        Checkpoint.load_objects(objects, str(options.resume / "half.pt"))
    trainer.run(DataLoader(next_characters(LONG, first=trainer.state.iteration), 32))
    report(version=ignite.__version__, losses=losses)


if __name__ == "__main__":
    main()
