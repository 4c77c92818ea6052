"""Image translation with adversaries: lists of models and of optimizers, a scaler for each loss."""
# ruff: noqa: UP031, N802, N803, N806, N816

import argparse
import itertools

import torch
import torch.nn as nn
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
parser.add_argument("--keep-return", action="store_true", help="use what initialize returns, not the old names")
opt = parser.parse_args()
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class CycleGANModel:
    def __init__(self):
        def generator():
            return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 1))

        def discriminator():
            return nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3))

        self.netG_A, self.netG_B = generator().to(device), generator().to(device)
        self.netD_A, self.netD_B = discriminator().to(device), discriminator().to(device)
        self.optimizer_G = torch.optim.SGD(
            itertools.chain(self.netG_A.parameters(), self.netG_B.parameters()), lr=0.005, momentum=0.5
        )
        self.optimizer_D = torch.optim.SGD(itertools.chain(self.netD_A.parameters(), self.netD_B.parameters()), lr=0.01)
        models = [self.netG_A, self.netG_B, self.netD_A, self.netD_B]
        optimizers = [self.optimizer_G, self.optimizer_D]
        returned, returned_optimizers = amp.initialize(models, optimizers, opt_level=opt.opt_level, num_losses=3)
        if opt.keep_return:
            self.netG_A, self.netG_B, self.netD_A, self.netD_B = returned
            self.optimizer_G, self.optimizer_D = returned_optimizers
        self.criterionGAN, self.criterionCycle = nn.MSELoss(), nn.L1Loss()

    def set_requires_grad(self, nets, requires_grad):
        for net in nets:
            for param in net.parameters():
                param.requires_grad = requires_grad

    def backward_D_basic(self, netD, real, fake, loss_id):
        pred_real, pred_fake = netD(real), netD(fake.detach())
        loss_D = self.criterionGAN(pred_real, torch.ones_like(pred_real))
        loss_D = (loss_D + self.criterionGAN(pred_fake, torch.zeros_like(pred_fake))) * 0.5
        if loss_id == 1:
            with amp.scale_loss(loss_D, self.optimizer_D, loss_id=loss_id) as scaled:
                scaled.backward()
        else:
            with amp.scale_loss(loss_D, [self.optimizer_D], loss_id) as scaled:
                scaled.backward()
        return loss_D

    def optimize_parameters(self, real_A, real_B):
        fake_B, fake_A = self.netG_A(real_A), self.netG_B(real_B)
        rec_A, rec_B = self.netG_B(fake_B), self.netG_A(fake_A)
        self.set_requires_grad([self.netD_A, self.netD_B], False)
        self.optimizer_G.zero_grad()
        pred_B, pred_A = self.netD_A(fake_B), self.netD_B(fake_A)
        loss_GAN = self.criterionGAN(pred_B, torch.ones_like(pred_B)) + self.criterionGAN(
            pred_A, torch.ones_like(pred_A)
        )
        loss_cycle = self.criterionCycle(rec_A, real_A) + self.criterionCycle(rec_B, real_B)
        with amp.scale_loss(0.1 * loss_GAN + 10 * loss_cycle, self.optimizer_G, loss_id=0) as scaled:
            scaled.backward()
        self.optimizer_G.step()
        self.set_requires_grad([self.netD_A, self.netD_B], True)
        self.optimizer_D.zero_grad()
        loss_D_A = self.backward_D_basic(self.netD_A, real_B, fake_B, 1)
        loss_D_B = self.backward_D_basic(self.netD_B, real_A, fake_A, 2)
        self.optimizer_D.step()
        return loss_cycle.item(), (loss_D_A + loss_D_B).item()


torch.manual_seed(0)
model = CycleGANModel()
for i in range(40):
    real_A = torch.rand(4, 1, 8, 8, device=device)
    cycle, D = model.optimize_parameters(real_A, 1 - real_A)
    print("(iters: %d) D: %.3f loss: %.5f" % (i, D, cycle))
print("losses tracked:", len(amp.state_dict()))
