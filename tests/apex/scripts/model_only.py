"""Models initialised on their own, in lists and with an average of their weights; evaluation by the average."""
# ruff: noqa: UP031

import argparse
from copy import deepcopy

import torch
import torch.nn as nn
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
parser.add_argument("--average", default="after", choices=["after", "in_list"])
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class ModelEMA:
    def __init__(self, model, decay=0.8):
        self.ema = deepcopy(model).eval()
        self.decay = decay
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        with torch.no_grad():
            state = model.state_dict()
            for name, value in self.ema.state_dict().items():
                if value.dtype.is_floating_point:
                    value *= self.decay
                    value += (1.0 - self.decay) * state[name].detach()


class WeightEMA:
    """Averages parameters in place, for a teacher that was given to initialize beside its student."""

    def __init__(self, model, ema):
        self.model, self.ema = model, ema

    def step(self):
        for p, q in zip(self.model.parameters(), self.ema.parameters(), strict=True):
            q.data.mul_(0.8).add_(p.data, alpha=0.2)


def build():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)


torch.manual_seed(0)
backbone = amp.initialize(build(), opt_level=args.opt_level, verbosity=0)
assert isinstance(backbone, nn.Module)
frozen, nothing = amp.initialize(build(), [], opt_level=args.opt_level, verbosity=0)
assert isinstance(frozen, nn.Module)
assert nothing == []
with torch.no_grad():
    features = frozen(torch.randn(2, 8, device=device))
print("frozen output", features.dtype)

model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if args.average == "in_list":
    teacher = deepcopy(model)
    for p in teacher.parameters():
        p.detach_()
    [model, teacher], optimizer = amp.initialize([model, teacher], optimizer, opt_level=args.opt_level)
    average = WeightEMA(model, teacher)
else:
    [model], optimizer = amp.initialize([model], optimizer, opt_level=args.opt_level)
    average = ModelEMA(model)
patterns = torch.randn(4, 8)
for i in range(40):
    y = torch.randint(4, (16,))
    x = patterns[y] + 0.3 * torch.randn(16, 8)
    with amp.scale_loss(nn.functional.cross_entropy(model(x.to(device)), y.to(device)), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.step() if args.average == "in_list" else average.update(model)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(average.ema(patterns.to(device)).float(), torch.arange(4, device=device))
    print("iter %d averaged loss %.5f" % (i, loss.item()))
