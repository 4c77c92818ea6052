"""Autograd functions and extension calls of one's own, told which type they take."""

import argparse

import torch
import torch.nn as nn
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Swish(torch.autograd.Function):
    """Refuses half, as a kernel that was compiled for FP32 alone."""

    @staticmethod
    def forward(ctx, x):
        if args.opt_level == "O1" and x.dtype != torch.float32:
            raise RuntimeError(f'"swish_kernel" not implemented for {x.dtype}')
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * s * (1 + x * (1 - s))


swish = amp.float_function(Swish.apply)


class RoundedLinear(torch.autograd.Function):
    @staticmethod
    @amp.half_function
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        if args.opt_level == "O1":
            assert x.dtype == weight.dtype == torch.float16, (x.dtype, weight.dtype)
        return x @ weight.t()

    @staticmethod
    @amp.float_function
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if args.opt_level == "O1":
            assert grad.dtype == torch.float32
        return grad.to(x.dtype) @ weight, grad.to(x.dtype).t() @ x


class Pairwise:
    @amp.promote_function
    def residual(self, a, b):
        if args.opt_level in ("O1", "O2"):
            assert a.dtype == b.dtype
        return a + b


nms = amp.float_function(torch.ops.aten.clamp_min)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.last = nn.Linear(16, 1)
        self.residual = amp.promote_function(Pairwise().residual)

    def forward(self, x):
        h = swish(self.first(x))
        h = self.residual(RoundedLinear.apply(h, self.weight), h)
        return self.last(nms(h, -3.0))


torch.manual_seed(0)
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
for step in range(60):
    x = torch.randn(32, 8, device=device)
    loss = nn.functional.mse_loss(model(x).float(), x[:, :1] * x[:, 1:2].sign())
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.5f}")
