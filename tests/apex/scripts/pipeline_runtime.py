"""A pipeline runtime that does without `scale_loss`: it prepares and finishes each optimizer's backward itself."""

import argparse

import torch
import torch.nn as nn
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O2")
parser.add_argument("--poison", type=int, default=None, help="this step's loss is not finite")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class StageRuntime:
    def __init__(self):
        self.stages = [
            nn.Sequential(nn.Linear(8, 16), nn.ReLU()).to(device),
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).to(device),
        ]
        self.optimizers = [torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9) for stage in self.stages]
        self.stages, self.optimizers = amp.initialize(
            self.stages, self.optimizers, opt_level=args.opt_level, master_weights=None, loss_scale="dynamic"
        )
        self.loss_scaler = amp._amp_state.loss_scalers[0]
        assert all(hasattr(optimizer, "_amp_stash") for optimizer in self.optimizers)

    def run_backward(self, loss, boundary, received):
        for optimizer in self.optimizers:
            optimizer._prepare_amp_backward()
        (loss.float() * self.loss_scaler.loss_scale()).backward()
        boundary.backward(received.grad)
        self.loss_scaler.clear_overflow_state()
        for optimizer in self.optimizers:
            optimizer._post_amp_backward(self.loss_scaler)
            optimizer._amp_stash.params_have_scaled_gradients = False
        return self.loss_scaler.update_scale()

    def train_step(self, x, y, poisoned):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        boundary = self.stages[0](x)
        received = boundary.detach().requires_grad_()
        loss = nn.functional.mse_loss(self.stages[1](received), y)
        overflow = self.run_backward(loss * float("inf") if poisoned else loss, boundary, received)
        if overflow:
            print("overflow, scale is now", self.loss_scaler.loss_scale())
        else:
            for optimizer in self.optimizers:
                optimizer.step()
        return loss.item()


torch.manual_seed(0)
runtime = StageRuntime()
teacher = torch.randn(8, 1)
for step in range(60):
    x = torch.randn(32, 8)
    loss = runtime.train_step(x.to(device), (x @ teacher).abs().to(device), step == args.poison)
    print(f"step {step} loss {loss:.5f}")
