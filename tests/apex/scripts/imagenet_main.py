"""An image classifier in the shape of the ImageNet example that half of the scripts of those years grew from."""
# ruff: noqa: F403, F405

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

try:
    from apex import amp, optimizers
    from apex.fp16_utils import *
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.parallel import DistributedDataParallel as DDP  # noqa: N817
except ImportError as error:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.") from error

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("--epochs", default=5, type=int)
parser.add_argument("--lr", default=0.02, type=float)
parser.add_argument("--sync_bn", action="store_true")
parser.add_argument("--fused", action="store_true", help="FusedSGD instead of torch.optim.SGD")
parser.add_argument("--opt-level", type=str)
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--loss-scale", type=str, default=None)
parser.add_argument("--checkpoint", type=str, default=None)
parser.add_argument("--resume", type=str, default=None)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"


class DataPrefetcher:
    """Moves and normalizes the next batch while the present one is trained on."""

    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.mean = torch.tensor([0.485 * 255, 0.456 * 255, 0.406 * 255]).to(device).view(1, 3, 1, 1)
        self.std = torch.tensor([0.229 * 255, 0.224 * 255, 0.225 * 255]).to(device).view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.to(device, non_blocking=True).float()
            self.next_target = self.next_target.to(device, non_blocking=True)
            self.next_input = self.next_input.sub_(self.mean).div_(self.std)

    def next(self):
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        self.preload()
        return input, target


def images(n):
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 256, (4, 3, 8, 8), generator=generator).float()
    target = torch.randint(4, (n,), generator=generator)
    noise = 40 * torch.randn(n, 3, 8, 8, generator=generator)
    input = (patterns[target] + noise).clamp(0, 255).to(torch.uint8)
    return [(input[i : i + 16], target[i : i + 16]) for i in range(0, n, 16)]


def reduce_tensor(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= dist.get_world_size()
    return rt


def main():
    print(f"opt_level = {args.opt_level}")
    print(f"keep_batchnorm_fp32 = {args.keep_batchnorm_fp32}", type(args.keep_batchnorm_fp32))
    print(f"loss_scale = {args.loss_scale}", type(args.loss_scale))
    args.distributed = "WORLD_SIZE" in os.environ
    if args.distributed:
        dist.init_process_group(backend="nccl" if device == "cuda" else "gloo", init_method="env://")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    if args.sync_bn:
        import apex

        print("using apex synced BN")
        model = apex.parallel.convert_syncbn_model(model)
    model = model.to(device)
    sgd = optimizers.FusedSGD if args.fused else torch.optim.SGD
    optimizer = sgd(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss().to(device)
    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {start_epoch})")
    loader = images(64)
    for epoch in range(start_epoch, args.epochs):
        prefetcher = DataPrefetcher(loader)
        input, target = prefetcher.next()
        total, i = 0.0, 0
        while input is not None:
            i += 1
            output = model(input)
            loss = criterion(output, target)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            reduced_loss = reduce_tensor(loss.data) if args.distributed else loss.data
            total += to_python_float(reduced_loss)
            input, target = prefetcher.next()
        print(f"Epoch: [{epoch}] Loss {total / i:.10f}")
        if args.checkpoint:
            checkpoint = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "amp": amp.state_dict(),
            }
            torch.save(checkpoint, f"{args.checkpoint}.{epoch}")
    print(f"multi_tensor_applier.available = {multi_tensor_applier.available}")
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
