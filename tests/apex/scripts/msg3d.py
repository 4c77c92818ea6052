"""Skeleton actions: initialize first, DataParallel later, weights saved from the wrapper, scaler state beside them."""
# ruff: noqa: UP031

import argparse
import os

import apex
import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--half", action="store_true")
parser.add_argument("--amp-opt-level", type=int, default=1)
parser.add_argument("--work-dir", required=True)
parser.add_argument("--forward-batch-size", type=int, default=8)
arg = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.data_bn = nn.BatchNorm1d(6)
        self.gcn = nn.Parameter(torch.eye(3) + 0.1 * torch.randn(3, 3))
        self.temporal = nn.Conv2d(2, 16, (3, 1), padding=(1, 0))
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        n, c, t, v = x.shape
        x = self.data_bn(x.permute(0, 3, 1, 2).reshape(n, v * c, t)).view(n, v, c, t).permute(0, 2, 3, 1)
        x = torch.einsum("vu,nctu->nctv", self.gcn, x)
        return self.fc(torch.relu(self.temporal(x)).mean((2, 3)))


torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
if arg.half:
    print("*************************************")
    print("*** Using Half Precision Training ***")
    print("*************************************")
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=f"O{arg.amp_opt_level}")
    if arg.amp_opt_level != 1:
        print("[WARN] nn.DataParallel is not yet supported by amp_opt_level != 'O1'")
model = nn.DataParallel(model)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30], gamma=0.1)
patterns = torch.randn(4, 2, 8, 3)
for step in range(40):
    labels = torch.randint(4, (16,))
    data = patterns[labels] + 0.5 * torch.randn(16, 2, 8, 3)
    optimizer.zero_grad()
    splits, total = len(data) // arg.forward_batch_size, 0.0
    for i in range(splits):
        left = i * arg.forward_batch_size
        batch = slice(left, left + arg.forward_batch_size)
        output = model(data[batch].to(device))
        loss = nn.functional.cross_entropy(output, labels[batch].to(device)) / splits
        if arg.half:
            with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    scheduler.step()
    print("step %d loss: %.5f" % (step, total))
state = {"optimizer_states": optimizer.state_dict(), "lr_scheduler_states": scheduler.state_dict()}
torch.save(state, os.path.join(arg.work_dir, "checkpoint.pt"))
weights = {name.split("module.")[-1]: value.cpu() for name, value in model.state_dict().items()}
torch.save(weights, os.path.join(arg.work_dir, "weights.pt"))
fresh = Model()
fresh.load_state_dict(weights)
print("saved as", weights["fc.weight"].dtype)
