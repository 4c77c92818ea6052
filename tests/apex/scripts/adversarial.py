"""Adversarial training: input gradients through `scale_loss(loss, [])`, and attacks with the casts off."""
# ruff: noqa: UP031

import argparse

import apex.amp as amp
import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--loss-scale", default="1.0", choices=["1.0", "dynamic"])
parser.add_argument("--master-weights", action="store_true")
parser.add_argument("--attack", default="pgd", choices=["pgd", "free", "disable_casts"])
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
epsilon, alpha = 0.2, 0.1


def attack_pgd(model, x, y, opt):
    """The gradient of the input only: the model's parameters keep theirs."""
    delta = torch.zeros_like(x).uniform_(-epsilon, epsilon).requires_grad_()
    for _ in range(2):
        if args.attack == "disable_casts":
            with amp.disable_casts():
                logits = model(x + delta)
                assert logits.dtype == torch.float32
                grad = torch.autograd.grad(F.cross_entropy(logits, y), delta)[0]
        else:
            loss = F.cross_entropy(model(x + delta), y)
            with amp.scale_loss(loss, [] if args.attack == "free" else opt) as scaled_loss:
                scaled_loss.backward()
            grad = delta.grad.detach()
        delta.data = torch.clamp(delta + alpha * torch.sign(grad), -epsilon, epsilon)
        if delta.grad is not None:
            delta.grad.zero_()
    return delta.detach()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
    model.train()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    amp_args = {"opt_level": args.opt_level, "loss_scale": args.loss_scale, "verbosity": False}
    if args.opt_level == "O2":
        amp_args["master_weights"] = args.master_weights
    model, opt = amp.initialize(model, opt, **amp_args)
    scheduler = torch.optim.lr_scheduler.CyclicLR(
        opt, base_lr=0.0, max_lr=0.1, step_size_up=20, step_size_down=20, cycle_momentum=False
    )
    centres = 2 * torch.randn(3, 8)
    for i in range(40):
        y = torch.randint(3, (32,), device=device)
        x = centres.to(device)[y] + 0.3 * torch.randn(32, 8, device=device)
        delta = attack_pgd(model, x, y, opt)
        output = model(x + delta)
        loss = F.cross_entropy(output, y)
        opt.zero_grad()
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
        scheduler.step()
        print("%d \t lr %.4f \t loss %.4f" % (i, scheduler.get_last_lr()[0], loss.item()))


if __name__ == "__main__":
    main()
