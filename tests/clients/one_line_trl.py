"""A Llama in bfloat16 through TRL's SFTTrainer, and by variants its DPOTrainer and GRPOTrainer."""

import torchvision_operators  # noqa: F401  (before trl, which imports torchvision)
import trl
from common import LONG, SAVED_AT, arguments, in_bfloat16, report
from trl_trainers import KINDS, losses_of, new_model, new_trainer, options_of

from amp_engine import amp

# Steps that are too small for bfloat16: standard deviation of the weights, and learning rate.
SIZES = {"": (0.25, 5e-4), "dpo": (0.1, 1e-4), "grpo": (0.25, 5e-4)}


def main() -> None:
    options = arguments(__doc__)
    deviation, rate = SIZES[options.variant]
    model, reference = (in_bfloat16(new_model(initializer_range=deviation), options.level) for _ in range(2))
    if options.level in ("O4", "O5"):
        amp.initialize(model, opt_level=options.level)
    training = options_of(
        options.out,
        learning_rate=rate,
        max_steps=LONG,
        lr_scheduler_type="constant",
        save_steps=SAVED_AT,
    )
    trainer = new_trainer(options.variant, KINDS[options.variant], model, reference, training)
    trainer.train(resume_from_checkpoint=options.resume and str(options.resume / f"checkpoint-{SAVED_AT}"))
    losses = losses_of(trainer, options.variant)[SAVED_AT if options.resume else 0 :]
    report(version=trl.__version__, losses=losses)


if __name__ == "__main__":
    main()
