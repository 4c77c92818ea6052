"""Two models, two optimizers, three losses: a GAN learns eight points on a circle.

Each loss has a scaler of its own (``num_losses=3`` and ``loss_id``): the three differ in size, and an
overflow of one must not lower the scale of the others. Losses are computed on logits, because
``binary_cross_entropy`` on float16 probabilities is refused at O1.

    python examples/gan.py --opt-level O1 --steps 500
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine import amp

parser = argparse.ArgumentParser(description="A GAN on eight points of a circle.")
parser.add_argument("--opt-level", default="O1", help="O0 to O5, default: %(default)s")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=256)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# ---------------------------------------------------------------------------------------------
# the data: eight narrow Gaussians around the unit circle, samples [B, 2]

angles = torch.arange(8) * (2 * math.pi / 8)
centers = torch.stack([angles.cos(), angles.sin()], dim=1).to(device)


def sample_real(batch_size: int) -> Tensor:
    which = torch.randint(len(centers), (batch_size,), device=device)
    return centers[which] + 0.05 * torch.randn(batch_size, 2, device=device)


def sample_noise(batch_size: int) -> Tensor:
    return torch.randn(batch_size, 16, device=device)


# ---------------------------------------------------------------------------------------------
# the models, their optimizers, and one initialize for all of them


def mlp(inputs: int, outputs: int, width: int = 128) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    ).to(device)


generator, discriminator = mlp(16, 2), mlp(2, 1)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99), eps=1e-5)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99), eps=1e-5)
[generator, discriminator], [optimizer_g, optimizer_d] = amp.initialize(
    [generator, discriminator],
    [optimizer_g, optimizer_d],
    opt_level=options.opt_level,
    num_losses=3,
)

# ---------------------------------------------------------------------------------------------
# the loop


def logistic_loss(logits: Tensor, target: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


for step in range(options.steps):
    # 1. The discriminator: real points are 1, generated points 0. Its two backwards accumulate.
    optimizer_d.zero_grad()
    loss_real = logistic_loss(discriminator(sample_real(options.batch_size)), 1.0)
    with amp.scale_loss(loss_real, optimizer_d, loss_id=0) as scaled_loss:
        scaled_loss.backward()

    fake = generator(sample_noise(options.batch_size))
    loss_fake = logistic_loss(discriminator(fake.detach()), 0.0)
    with amp.scale_loss(loss_fake, optimizer_d, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    optimizer_d.step()

    # 2. The generator: the discriminator should take its points for real. The backward also gives
    #    the discriminator gradients; optimizer_d.zero_grad() above discards them.
    optimizer_g.zero_grad()
    loss_generator = logistic_loss(discriminator(fake), 1.0)
    with amp.scale_loss(loss_generator, optimizer_g, loss_id=2) as scaled_loss:
        scaled_loss.backward()
    optimizer_g.step()

    if step % 100 == 0 or step == options.steps - 1:
        print(
            f"step {step:4}  real {loss_real.item():.3f}  fake {loss_fake.item():.3f}"
            f"  generator {loss_generator.item():.3f}"
        )

# ---------------------------------------------------------------------------------------------
# the quality: the distance of generated points to the nearest center, and the centers hit

generator.eval()
with torch.no_grad(), amp.disable_casts():
    points = generator(sample_noise(2048)).float()
distance, nearest = torch.cdist(points, centers).min(dim=1)
hit = nearest[distance < 0.2].unique().numel()
print(f"mean distance to a center {distance.mean().item():.3f}, centers hit {hit} of 8")
for name, scaler in amp.state_dict().items():
    print(f"{name}: {scaler['loss_scale']}")
