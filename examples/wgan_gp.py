"""A gradient penalty: a Wasserstein GAN (Gulrajani et al., 2017, arXiv:1704.00028) learns eight points on a circle.

A penalty pulls the norm of the critic's gradients between real and generated points to 1, so its backward goes through
these gradients. `torch.autograd.grad` computes them outside of `scale_loss`, where they would underflow in float16, so
`amp.scale` scales their loss. `amp.unscale` returns them in FP32; if one of them overflowed, the step is skipped.

    python examples/wgan_gp.py --opt-level O1 --steps 500
"""

import argparse
import math

import torch
from torch import Tensor, nn

from amp_engine import amp

parser = argparse.ArgumentParser(description="A Wasserstein GAN with a gradient penalty on eight points of a circle.")
parser.add_argument("--opt-level", default="O1", help="O0 to O5, default: %(default)s")
parser.add_argument("--steps", type=int, default=500, help="of the generator")
parser.add_argument("--critic-steps", type=int, default=3, help="for each of them, default: %(default)s")
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--penalty", type=float, default=1.0, help="weight of the gradient penalty, default: %(default)s")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# ---------------------------------------------------------------------------------------------
# the data: eight narrow Gaussians around the unit circle, samples [B, 2]

angles = torch.arange(8) * (2 * math.pi / 8)
centers = torch.stack([angles.cos(), angles.sin()], dim=1).to(device)


def sample_real() -> Tensor:
    which = torch.randint(len(centers), (options.batch_size,), device=device)
    return centers[which] + 0.05 * torch.randn(options.batch_size, 2, device=device)


def sample_noise(size: int = options.batch_size) -> Tensor:
    return torch.randn(size, 16, device=device)


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


generator, critic = mlp(16, 2), mlp(2, 1)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-5)
optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-5)
[generator, critic], [optimizer_g, optimizer_c] = amp.initialize(
    [generator, critic], [optimizer_g, optimizer_c], opt_level=options.opt_level, num_losses=2
)
CRITIC, GENERATOR = 0, 1  # loss ids, each with a scale of its own

# ---------------------------------------------------------------------------------------------
# the loop


def slopes(real: Tensor, fake: Tensor) -> Tensor:
    """The norms [B] of the critic's gradients at random points between real and generated ones."""
    weight = torch.rand(len(real), 1, device=device)
    points = torch.lerp(real, fake, weight).requires_grad_()
    scores = amp.scale(critic(points).sum(), loss_id=CRITIC)
    (gradients,) = torch.autograd.grad(scores, points, create_graph=True)
    return amp.unscale(gradients, loss_id=CRITIC).norm(dim=1)


for step in range(options.steps):
    for _ in range(options.critic_steps):
        real = sample_real()
        with torch.no_grad():
            fake = generator(sample_noise()).float()
        optimizer_c.zero_grad()
        slope = slopes(real, fake)
        distance = critic(real).float().mean() - critic(fake).float().mean()
        loss_critic = options.penalty * (slope - 1).square().mean() - distance
        with amp.scale_loss(loss_critic, optimizer_c, loss_id=CRITIC) as scaled_loss:
            scaled_loss.backward()
        optimizer_c.step()

    optimizer_g.zero_grad()
    loss_generator = -critic(generator(sample_noise())).float().mean()
    with amp.scale_loss(loss_generator, optimizer_g, loss_id=GENERATOR) as scaled_loss:
        scaled_loss.backward()
    optimizer_g.step()

    if step % 100 == 0 or step == options.steps - 1:
        print(f"step {step:4}  distance {distance.item():.3f}  slope {slope.mean().item():.3f}")

# ---------------------------------------------------------------------------------------------
# the quality: the distance of generated points to the nearest center, and the centers hit

generator.eval()
with torch.no_grad(), amp.disable_casts():
    points = generator(sample_noise(2048)).float()
away, nearest = torch.cdist(points, centers).min(dim=1)
hit = nearest[away < 0.2].unique().numel()
print(f"mean distance to a center {away.mean().item():.3f}, centers hit {hit} of 8")
for name, scaler in amp.state_dict().items():
    print(f"{name}: {scaler['loss_scale']}")
