"""A small diffusion model of scikit-learn's digits in the loop of diffusers' examples: Accelerate and EMAModel."""

import diffusers
import torch
import torch.nn.functional as F
import torchvision_operators  # noqa: F401  (before diffusers, which imports torchvision)
from accelerate import Accelerator
from common import EPS, SAVED_AT, STEPS, arguments, lower_scale, report, scaler_state
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from sklearn.datasets import load_digits

from amp_engine import amp
from amp_engine.integrations.accelerate import use

ACCUMULATE = 2
BATCH = 16


def new_model() -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    )


class Noised:
    """Batches of images with noise."""

    def __init__(self) -> None:
        self.scheduler = DDPMScheduler(num_train_timesteps=100)
        self.images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 8 - 1  # the pixels are 0..16

    def drawn(self, seed: int, dtype: torch.dtype = torch.float32):
        """Noisy images, their time steps, and the noise."""
        generator = torch.Generator().manual_seed(seed)
        clean = self.images[torch.randint(len(self.images), (BATCH,), generator=generator)]
        noise = torch.randn(clean.shape, generator=generator).to(dtype)
        when = torch.randint(100, (BATCH,), generator=generator)
        return self.scheduler.add_noise(clean.to(dtype), noise, when), when, noise


class Loop:
    """Everything that Accelerate prepares, and the average, at one level."""

    def __init__(self, level: str, **options) -> None:
        self.accelerator = use(
            Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE), opt_level=level, **options
        )
        model = new_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=EPS)
        self.ema = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.expected = EMAModel(self.weights(), decay=0.9)  # of copies in FP32
        self.accelerator.register_for_checkpointing(self.ema, self.expected)
        self.noised = Noised()

    def weights(self):
        state = self.model.state_dict()
        return [state[name].detach().float().requires_grad_() for name, _ in self.model.named_parameters()]

    def iterate(self, index: int, factor: float = 1.0) -> float:
        noisy, when, noise = self.noised.drawn(index)
        with self.accelerator.accumulate(self.model):
            found = self.model(noisy, when).sample
            loss = F.mse_loss(found.float(), noise)
            self.accelerator.backward(loss * factor)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients and not self.accelerator.optimizer_step_was_skipped:
            self.ema.step(amp.master_params(self.optimizer))
            self.expected.step(self.weights())
        return loss.item()


def check_skips(level: str) -> None:
    """A loss scale that is too large: neither weights nor their average move."""
    loop = Loop(level, loss_scale=2.0**125, skip_on_overflow=True)
    before = [p.detach().clone() for p in loop.model.parameters()]
    for index in range(ACCUMULATE):
        loop.iterate(index, factor=1e3)
    assert all(map(torch.equal, before, loop.model.parameters()))
    assert loop.ema.optimization_step == 0
    amp.close()


def check_average(loop: Loop, folder) -> None:
    """The average is that of FP32 weights, the model computes with it until `restore`, and the file has it exactly."""
    is_half = all(p.dtype != torch.float32 for p in amp.master_params(loop.optimizer))
    if not is_half:  # O3 has no masters
        assert all(map(torch.equal, loop.ema.shadow_params, loop.expected.shadow_params))
    before = [weight.clone() for weight in loop.weights()]
    loop.ema.store(loop.model.parameters())
    loop.ema.copy_to(loop.model.parameters())
    for param, average in zip(loop.model.parameters(), loop.ema.shadow_params, strict=True):
        assert torch.equal(param, average.to(param.dtype))
    loop.ema.restore(loop.model.parameters())
    assert all(map(torch.equal, before, loop.weights()))
    loop.ema.save_pretrained(folder)
    loaded = UNet2DModel.from_pretrained(folder)
    for param, average in zip(loaded.parameters(), loop.ema.shadow_params, strict=True):
        assert param.dtype == torch.float32
        assert torch.equal(param, average.float())


def main() -> None:
    options = arguments(__doc__)
    if not options.resume:
        check_skips(options.level)
    loop = Loop(options.level)
    lower_scale()
    start, restored, saved = 0, None, None
    if options.resume:
        loop.accelerator.load_state(str(options.resume / "state"))
        start, restored = SAVED_AT, scaler_state()
    losses = []
    for index in range(start * ACCUMULATE, STEPS * ACCUMULATE):
        losses.append(loop.iterate(index))
        if index + 1 == SAVED_AT * ACCUMULATE:
            loop.accelerator.save_state(str(options.out / "state"))
            saved = scaler_state()
    check_average(loop, options.out / "average")
    report(version=diffusers.__version__, losses=losses, saved=saved, restored=restored)


if __name__ == "__main__":
    main()
