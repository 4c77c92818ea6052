"""A small GAN with a gradient penalty, an EMA generator, and loss ids that stand third."""
# ruff: noqa: N806

import argparse
import copy
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import grad as torch_grad

try:
    from apex import amp

    APEX_AVAILABLE = True
except ImportError:
    APEX_AVAILABLE = False

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--opt_level", default="O1")
args = parser.parse_args()
assert not args.fp16 or APEX_AVAILABLE, "Apex is not available for you to use mixed precision training"
device = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def null_context(loss):
    yield loss


def loss_backwards(fp16, loss, optimizer, loss_id, **kwargs):
    if fp16:
        with amp.scale_loss(loss, optimizer, loss_id) as scaled_loss:
            scaled_loss.backward(**kwargs)
    else:
        loss.backward(**kwargs)


def gradient_penalty(images, output, weight=2):
    gradients = torch_grad(
        outputs=output,
        inputs=images,
        grad_outputs=torch.ones(output.size(), device=images.device),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.reshape(images.shape[0], -1)
    return weight * gradients.float().pow(2).sum(1).mean()


class StyleGAN2(nn.Module):
    def __init__(self):
        super().__init__()
        self.G = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
        self.D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.GE = copy.deepcopy(self.G)
        for p in self.GE.parameters():
            p.requires_grad = False
        self.to(device)
        self.G_opt = torch.optim.SGD(self.G.parameters(), lr=0.05)
        self.D_opt = torch.optim.SGD(self.D.parameters(), lr=0.05)
        if args.fp16:
            (self.G, self.D, self.GE), (self.G_opt, self.D_opt) = amp.initialize(
                [self.G, self.D, self.GE], [self.G_opt, self.D_opt], opt_level=args.opt_level, num_losses=3
            )

    def EMA(self):  # noqa: N802
        for current, moving in zip(self.G.parameters(), self.GE.parameters(), strict=True):
            moving.data = 0.9 * moving.data + 0.1 * current.data


torch.manual_seed(0)
gan = StyleGAN2()
gan.train()
for step in range(160):
    real = (torch.randn(32, 2) * 0.2 + 1.0).to(device).requires_grad_()
    gan.D_opt.zero_grad()
    fake = gan.G(torch.randn(32, 4, device=device))
    real_output, fake_output = gan.D(real), gan.D(fake.clone().detach())
    disc_loss = (F.relu(1 + real_output) + F.relu(1 - fake_output)).mean()
    if step % 2 == 0:
        disc_loss = disc_loss + gradient_penalty(real, real_output)
    loss_backwards(args.fp16, disc_loss, gan.D_opt, 1)
    gan.D_opt.step()

    gan.G_opt.zero_grad()
    gen_loss = gan.D(gan.G(torch.randn(32, 4, device=device))).mean()
    loss_backwards(args.fp16, gen_loss, gan.G_opt, 2)
    gan.G_opt.step()
    gan.EMA()
    with torch.no_grad():
        distance = (gan.GE(torch.randn(64, 4, device=device)).float().mean(0) - 1.0).norm()
    print(f"G: {gen_loss.item():.3f} | D: {disc_loss.item():.3f} | distance loss: {distance.item():.4f}")
