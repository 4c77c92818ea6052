"""A framework that looks inside: patches of forward put back by class, properties read, casts turned off by handle."""

import argparse

import torch
import torch.nn as nn
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O2")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


def wrap_into_data_parallel(model, optimizer, **kwargs):
    """Casts that follow each replica: initialize an outer shell, keep the inner model, cast around it by hand."""
    shell, optimizer = amp.initialize(nn.Sequential(model), optimizer, **kwargs)
    if amp._amp_state.opt_properties.options.get("cast_model_type") is None:
        return nn.DataParallel(shell), optimizer
    model = nn.DataParallel(shell[0])

    def cast_input(t):
        return t.to(amp._amp_state.opt_properties.options["cast_model_type"]) if t.is_floating_point() else t

    def cast_output(t):
        dtype = amp._amp_state.opt_properties.options.get("cast_model_outputs", torch.float32)
        return t.to(dtype) if t.is_floating_point() else t

    def new_fwd(*args, old_fwd=model.forward, **kwargs):
        args = amp._initialize.applier(args, cast_input)
        kwargs = amp._initialize.applier(kwargs, cast_input)
        return amp._initialize.applier(old_fwd(*args, **kwargs), cast_output)

    model.forward = new_fwd
    return model, optimizer


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = wrap_into_data_parallel(model, optimizer, opt_level=args.opt_level)
state = amp._amp_state
print("opt_level", state.opt_properties.opt_level, "masters", state.opt_properties.master_weights)
print("patches", state.opt_properties.patch_torch_functions, "scalers", len(state.loss_scalers))
default = amp.frontend.Properties()
assert default.opt_level is None
assert set(amp.frontend.opt_levels) >= {"O0", "O1", "O2", "O3"}
centres = 2 * torch.randn(3, 8)
for step in range(40):
    y = torch.randint(3, (16,))
    x = centres[y] + 0.5 * torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    optimizer.zero_grad()
    with amp.scale_loss(loss, [optimizer]) as scaled:
        scaled.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.5f}")
if state.opt_properties.patch_torch_functions:
    assert state.handle.is_active()
    state.handle._clear_cache()
    state.handle._deactivate()
    print("after the end:", torch.mm(torch.ones(2, 2, device=device), torch.ones(2, 2, device=device)).dtype)
