"""Fine-tuning a transformer on images: a loss scale that is written straight into the scaler, clipped masters."""
# ruff: noqa: UP031

import argparse

import torch
import torch.nn as nn
from apex import amp
from apex.parallel import DistributedDataParallel as DDP  # noqa: F401, N817
from torch.optim.lr_scheduler import LambdaLR

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--fp16_opt_level", type=str, default="O2")
parser.add_argument("--loss_scale", type=float, default=0)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--max_grad_norm", default=1.0, type=float)
args = parser.parse_args()
args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class VisionTransformer(nn.Module):
    def __init__(self, classes=4, width=32):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 5, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x, labels=None):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        logits = self.head(self.block(x)[:, 0])
        if labels is None:
            return logits
        return nn.CrossEntropyLoss()(logits.view(-1, logits.shape[-1]), labels.view(-1))


def main():
    torch.manual_seed(0)
    model = VisionTransformer().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0)
    total, warmup = 60, 4
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    if args.fp16:
        model, optimizer = amp.initialize(models=model, optimizers=optimizer, opt_level=args.fp16_opt_level)
        amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    patterns = torch.randn(4, 3, 8, 8)
    model.train()
    global_step = 0
    for step in range(total):
        y = torch.randint(4, (16,))
        x = patterns[y] + 0.5 * torch.randn(16, 3, 8, 8)
        loss = model(x.to(args.device), y.to(args.device))
        if args.gradient_accumulation_steps > 1:
            loss = loss / args.gradient_accumulation_steps
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        if (step + 1) % args.gradient_accumulation_steps == 0:
            if args.fp16:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            scheduler.step()
            optimizer.step()
            optimizer.zero_grad()
            global_step += 1
        print("Training (%d / %d Steps) (loss=%2.5f)" % (global_step, total, loss.item()))
    if args.fp16:
        print("final scale", amp._amp_state.loss_scalers[0].loss_scale())
    model.eval()
    with torch.no_grad():
        accuracy = (model(patterns.to(args.device)).argmax(-1).cpu() == torch.arange(4)).float().mean()
    print(f"Valid Accuracy: {accuracy:2.5f}")


if __name__ == "__main__":
    main()
