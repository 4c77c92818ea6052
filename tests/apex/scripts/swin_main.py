"""A vision loop with a wrapped scaler, as image model libraries have it: masters clipped, scale read from the state."""

import argparse

import torch
import torch.nn as nn

try:
    from apex import amp

    has_apex = True
except ImportError:
    amp = None
    has_apex = False

parser = argparse.ArgumentParser()
parser.add_argument("--amp-opt-level", type=str, default="O1", choices=["O0", "O1", "O2"])
parser.add_argument("--accumulation-steps", type=int, default=1)
parser.add_argument("--output", required=True)
parser.add_argument("--resume", default="")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class ApexScaler:
    state_dict_key = "amp"

    def __call__(self, loss, optimizer, clip_grad=None, create_graph=False):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        if clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip_grad)
        optimizer.step()

    def state_dict(self):
        if "state_dict" in amp.__dict__:
            return amp.state_dict()
        raise RuntimeError("this apex cannot save its scaler")

    def load_state_dict(self, state_dict):
        if "load_state_dict" in amp.__dict__:
            amp.load_state_dict(state_dict)


def get_grad_norm(parameters, norm_type=2):
    total_norm = 0
    for p in parameters:
        if p.grad is not None:
            total_norm += p.grad.data.norm(norm_type).item() ** norm_type
    return total_norm ** (1.0 / norm_type)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-8, betas=(0.9, 0.999), lr=5e-3, weight_decay=0.05)
    if args.amp_opt_level != "O0":
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.amp_opt_level)
    else:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=False)
        model.load_state_dict(checkpoint["model"], strict=False)
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        if "amp" in checkpoint and checkpoint["config"].amp_opt_level == args.amp_opt_level:
            amp.load_state_dict(checkpoint["amp"])
        start = checkpoint["epoch"] + 1
    scaler = ApexScaler()
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(4, 12, generator=generator)
    for epoch in range(start, 4):
        generator.manual_seed(epoch + 1)
        for _ in range(15):
            targets = torch.randint(4, (16,), generator=generator)
            samples = patterns[targets] + 0.5 * torch.randn(16, 12, generator=generator)
            loss = nn.functional.cross_entropy(model(samples.to(device)), targets.to(device))
            optimizer.zero_grad()
            scaler(loss, optimizer, clip_grad=5.0)
            lr_scheduler.step()
            print(
                f"Train: [{epoch}] lr {optimizer.param_groups[0]['lr']:.6f} loss {loss.item():.10f} "
                f"grad_norm {get_grad_norm(amp.master_params(optimizer)):.4f} "
                f"loss_scale {amp.state_dict()['loss_scaler0']['loss_scale']:.0f}"
            )
        save_state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "epoch": epoch,
            "config": args,
        }
        save_state[scaler.state_dict_key] = scaler.state_dict()
        torch.save(save_state, f"{args.output}/ckpt_epoch_{epoch}.pth")


if __name__ == "__main__":
    main()
