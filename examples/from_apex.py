"""A training script of the apex years, unchanged but for one line.

The line is the import: it was ``from apex import amp``. The command line flags, the printed banner,
the clipping of master parameters, the ``'amp'`` entry of the checkpoint and the order of loading
are as in such scripts.

    python examples/from_apex.py --opt-level O2 --loss-scale 128.0
    python examples/from_apex.py --opt-level O1 --epochs 4 --resume checkpoint.pt
"""

import argparse
import os
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from amp_engine import amp


def parse():
    parser = argparse.ArgumentParser(description="PyTorch classification training")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("-b", "--batch-size", default=64, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--weight-decay", default=1e-4, type=float)
    parser.add_argument("--clip", default=5.0, type=float)
    parser.add_argument("--print-freq", default=10, type=int)
    parser.add_argument("--resume", default="", type=str, metavar="PATH")
    parser.add_argument("--checkpoint", default="", type=str, metavar="PATH")
    parser.add_argument("--opt-level", default="O1", type=str)
    parser.add_argument("--keep-batchnorm-fp32", default=None, type=str)
    parser.add_argument("--loss-scale", default=None, type=str)
    return parser.parse_args()


class AverageMeter:
    """Keeps the latest value and the running average."""

    def __init__(self):
        self.val = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def synthetic_images(n, classes=10, size=16):
    """Stands for an image folder: a fixed pattern per class, seen through noise."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(classes, 3, size, size, generator=generator)
    labels = torch.randint(classes, (n,), generator=generator)
    images = patterns[labels] + 2.0 * torch.randn(n, 3, size, size, generator=generator)
    return TensorDataset(images, labels)


def build_model(classes=10):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


def main():
    args = parse()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(synthetic_images(1280), batch_size=args.batch_size, shuffle=True)

    model = build_model().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    start_epoch = 0
    if args.resume and os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume, map_location=device)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        amp.load_state_dict(checkpoint["amp"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {start_epoch})")

    for epoch in range(start_epoch, args.epochs):
        train(loader, model, criterion, optimizer, epoch, args, device)
        scheduler.step()
        if args.checkpoint:
            checkpoint = {
                "epoch": epoch + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "amp": amp.state_dict(),
            }
            torch.save(checkpoint, args.checkpoint)


def train(loader, model, criterion, optimizer, epoch, args, device):
    losses, top1, batch_time = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images, target = images.to(device), target.to(device)
        output = model(images)
        loss = criterion(output, target)

        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
        optimizer.step()

        correct = (output.argmax(dim=1) == target).float().mean().item()
        losses.update(loss.item(), images.size(0))
        top1.update(100 * correct, images.size(0))
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            print(
                f"Epoch: [{epoch}][{i}/{len(loader)}]\tTime {batch_time.val:.3f} ({batch_time.avg:.3f})"
                f"\tLoss {losses.val:.4f} ({losses.avg:.4f})\tPrec@1 {top1.val:.1f} ({top1.avg:.1f})"
            )
    print(f" * Epoch {epoch} Loss {losses.avg:.4f} Prec@1 {top1.avg:.2f}")


if __name__ == "__main__":
    main()
