"""A small diffusion model in bfloat16 in the loop of diffusers' unconditional example: Accelerate and EMAModel."""

import diffusers
import torch
import torch.nn.functional as F
import torchvision_operators  # noqa: F401  (before diffusers, which imports torchvision)
from accelerate import Accelerator
from common import LONG, SAVED_AT, arguments, in_bfloat16, report
from diffusers import UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from diffusers_unet import ACCUMULATE, Noised, new_model

from amp_engine import amp

RATE = 1e-4


def main() -> None:
    options = arguments(__doc__)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = in_bfloat16(new_model(), options.level)
    dtype = model.dtype
    average = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
    if options.level in ("O4", "O5"):
        average.to(dtype=torch.float32)
        amp.initialize(model, opt_level=options.level)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=4, num_training_steps=2 * LONG)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(average)
    first = 0
    if options.resume:
        accelerator.load_state(str(options.resume / "state"))
        first = SAVED_AT * ACCUMULATE
    noised = Noised()
    losses = []

    def loss_of(seed: int) -> torch.Tensor:
        noisy, when, noise = noised.drawn(seed, dtype)
        loss = F.mse_loss(model(noisy, when).sample.float(), noise.float())
        losses.append(loss.item())
        return loss

    for index in range(first, LONG * ACCUMULATE):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(index))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.step(amp.master_params(optimizer))
        if index + 1 == SAVED_AT * ACCUMULATE:
            accelerator.save_state(str(options.out / "state"))
    average.copy_to(model.parameters())
    with torch.no_grad():  # the losses of the average
        for index in range(8):
            loss_of(index)
    report(version=diffusers.__version__, losses=losses)


if __name__ == "__main__":
    main()
