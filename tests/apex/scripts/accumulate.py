"""Gradient accumulation, with `delay_unscale` on all but the last backward of a step and without."""
# ruff: noqa: UP031

import argparse

import torch
import torch.nn as nn
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
parser.add_argument("--mode", default="delay", choices=["delay", "plain", "hack"])
parser.add_argument("--loss_scale", default=None)
parser.add_argument("--iters_to_accumulate", type=int, default=4)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
if args.mode == "hack":  # quietens the scheduler about its order
    optimizer.zero_grad()
    optimizer.step()
teacher = torch.randn(8, 1)
running = 0.0
optimizer.zero_grad()
for i in range(80):
    x = torch.randn(16, 8)
    loss = nn.functional.mse_loss(model(x.to(device)), (x @ teacher).to(device)) / args.iters_to_accumulate
    running += loss.item()
    if (i + 1) % args.iters_to_accumulate == 0:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        print("step %d grad norm %.9e" % (i + 1, torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print("step %d loss %.5f" % (i + 1, running))
        running = 0.0
    else:
        with amp.scale_loss(loss, optimizer, delay_unscale=args.mode == "delay") as scaled_loss:
            scaled_loss.backward()
