"""A slow copy of the weights that is pulled along every few steps, by an optimizer around an optimizer."""

import argparse
from collections import defaultdict

import torch
import torch.nn as nn
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
parser.add_argument("--hooks", action="store_true", help="as written for a torch whose optimizers have step hooks")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Lookahead(torch.optim.Optimizer):
    """Shares the parameter groups of its base, and never calls the constructor of Optimizer."""

    def __init__(self, base_optimizer, alpha=0.5, k=5):
        if args.hooks:
            from collections import OrderedDict

            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.base_optimizer = base_optimizer
        self.param_groups = base_optimizer.param_groups
        self.defaults = base_optimizer.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group.update(lookahead_alpha=alpha, lookahead_k=k, lookahead_step=0)

    @torch.no_grad()
    def update_slow(self, group):
        for fast in group["params"]:
            if fast.grad is None:
                continue
            state = self.state[fast]
            if "slow" not in state:
                state["slow"] = fast.detach().clone()
            state["slow"].add_(fast - state["slow"], alpha=group["lookahead_alpha"])
            fast.copy_(state["slow"])

    def step(self, closure=None):
        loss = self.base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                self.update_slow(group)
        return loss

    def state_dict(self):
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.base_optimizer.load_state_dict(state_dict)
        self.param_groups = self.base_optimizer.param_groups


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
centres = torch.randn(3, 8)
for step in range(60):
    y = torch.randint(3, (16,))
    x = centres[y] + 0.5 * torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 10.0)
    optimizer.step()
    print(f"step {step} loss {loss.item():.5f}")
optimizer.load_state_dict(optimizer.state_dict())
