"""A model in bfloat16 through Accelerate's own loop: accumulation, clipping, save_state and load_state."""

import accelerate
from accelerate import Accelerator
from common import (
    LONG,
    OVERFLOWS_AT,
    SAVED_AT,
    WORLD_SIZE,
    NextCharacter,
    arguments,
    check_ranks_agree,
    cross_entropy,
    next_characters,
    overflow,
    report,
)
from torch.utils.data import DataLoader

from amp_engine import amp

ACCUMULATE = 2


def main() -> None:
    options = arguments(__doc__)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = NextCharacter(options.level)
    is_later, is_prepared = options.variant.endswith("later"), options.variant.endswith("prepared")
    if is_later and options.level != "O0":
        amp.initialize(model, opt_level=options.level)
    optimizer = model.optimizer()
    if options.level == "O5" and not (is_later or is_prepared):
        model, optimizer = amp.initialize(model, optimizer, opt_level="O5")
    batches = DataLoader(next_characters(LONG * ACCUMULATE * WORLD_SIZE), 32)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    if options.level == "O5" and is_prepared:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O5")
    start = 0
    if options.resume:
        accelerator.load_state(str(options.resume / "state"))
        start = SAVED_AT * ACCUMULATE
    losses = []
    for index, (context, target) in enumerate(accelerator.skip_first_batches(batches, start), start):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(context), target)
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if is_later and index // ACCUMULATE == OVERFLOWS_AT:
                    overflow(model, options.level)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if index + 1 == SAVED_AT * ACCUMULATE:
            accelerator.save_state(str(options.out / "state"))
    check_ranks_agree(model.parameters())
    report(version=accelerate.__version__, losses=losses)


if __name__ == "__main__":
    main()
