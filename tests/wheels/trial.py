"""A program for an environment that amp_engine was installed in: README's ten lines train a step with the kernels."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import amp_engine
from amp_engine import amp

readme = Path(sys.argv[1])
compilers = [name for name in ("cc", "c++", "gcc", "g++", "clang++", "nvcc") if shutil.which(name)]
assert not compilers, f"{compilers} could compile what the package lacks"
assert Path(amp_engine.__file__).is_relative_to(sys.prefix), f"{amp_engine.__file__} is not the installed package"
assert not Path(amp_engine.__file__).is_relative_to(readme.parent / "amp_engine"), "these are the sources"

info = subprocess.check_output([sys.executable, "-I", "-m", "amp_engine", "info"], text=True)
print(info)
assert re.search(r"^kernels +compiled for", info, re.MULTILINE), "no kernels"

model = nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
names = {
    "model": model,
    "optimizer": optimizer,
    "loss_fn": nn.MSELoss(),
    "batches": [(torch.ones(2, 8, dtype=torch.float16), torch.zeros(2, 4))],
}
before = model.weight.detach().clone()
lines = re.search(r"^```python\n(.*?)^```$", readme.read_text(), re.MULTILINE | re.DOTALL)
assert lines, f"{readme} has no Python"
exec(compile(lines[1], readme, "exec"), names)
assert not torch.equal(model.weight.float(), before), "nothing was stepped"
receipt = str(amp.receipt())
assert "AdamW: 2 tensors, stepped by compiled kernels; 0 of 1 step skipped" in receipt, receipt
