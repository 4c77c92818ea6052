"""The years before amp: a half network, FP16_Optimizer, and a closure; or masters that the script keeps itself."""
# ruff: noqa: F403, F405

import argparse

import torch
import torch.nn as nn
from apex.fp16_utils import *
from apex.fp16_utils.fp16_optimizer import FP16_Optimizer as Wrapped

assert Wrapped is FP16_Optimizer
parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="dynamic", choices=["dynamic", "static", "closure", "by_hand"])
parser.add_argument("--checkpoint", default=None)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Tanh(), nn.Conv1d(8, 2, 1)).to(device)
model = network_to_half(model)
if args.mode == "by_hand":
    model_params, master_params = prep_param_lists(model)
    optimizer = torch.optim.SGD(master_params, lr=0.1, momentum=0.9)
    scaler = LossScaler(128.0)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if args.mode == "static":
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0)
    else:
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**12})
    scheduler_group = optimizer.param_groups[0]


def criterion(x):
    return ((model(x).float() - 0.5 * x.flip(1)) ** 2).mean()


for iteration in range(60):
    x = torch.randn(8, 2, 16, device=device)
    if args.mode == "by_hand":
        loss = criterion(x)
        model.zero_grad()
        scaler.backward(loss)
        model_grads_to_master_grads(model_params, master_params)
        for param in master_params:
            param.grad.data.mul_(1.0 / scaler.loss_scale)
        clip_grad_norm(master_params, 1.0)
        optimizer.step()
        master_params_to_model_params(model_params, master_params)
    elif args.mode == "closure":

        def closure():
            optimizer.zero_grad()
            loss = criterion(x)  # noqa: B023
            optimizer.backward(loss)
            return loss

        loss = optimizer.step(closure)
    else:
        loss = criterion(x)
        optimizer.zero_grad()
        optimizer.backward(loss, update_master_grads=False)
        optimizer.update_master_grads()
        grad_norm = optimizer.clip_master_grads(1.0)
        optimizer.step()
        scheduler_group["lr"] *= 0.99
    print(f"{iteration}: loss {to_python_float(loss.data):.6f}")
if args.checkpoint and args.mode != "by_hand":
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)
    saved = torch.load(args.checkpoint, weights_only=False)
    kept = [master.clone() for group in optimizer.state_dict()["fp32_from_fp16"] for master in group]
    optimizer.zero_grad()
    optimizer.backward(criterion(torch.randn(8, 2, 16, device=device)))
    optimizer.step()
    optimizer.load_state_dict(saved["optimizer"])
    loaded = [master for group in optimizer.state_dict()["fp32_from_fp16"] for master in group]
    print("masters restored:", all(torch.equal(a, b) for a, b in zip(kept, loaded, strict=True)))
    print("loss scale:", optimizer.loss_scale)
