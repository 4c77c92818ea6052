"""torch's operators on lists leave held gradients alone, where their kernels ask for no memory as on GPUs, too."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from amp_engine import kernels

AS_ON_A_GPU = """if True:
    import ctypes
    import torch
    from torch import nn
    from amp_engine import amp

    library = torch.library.Library("aten", "IMPL")

    def zero(tensors, *_):  # past torch's check, as kernels do that take a pointer to read
        for tensor in tensors:
            ctypes.memset(torch._C._data_address(tensor), 0, tensor.numel() * tensor.element_size())

    def trained(level, operator=None):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        loss = model(torch.ones(2, 8)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        grads = [p.grad for p in model.parameters()]
        if operator:
            getattr(torch, operator.split(".")[0])(grads, *([0.0] if "mul" in operator else []))
            assert not any(g.any() for g in grads), "the kernel that stands in was not called"
        optimizer.step()
        values = [p.detach().float().clone() for p in model.parameters()]
        amp.close()
        return values

    for operator in ("_foreach_mul_.Scalar", "_foreach_zero_"):
        library.impl(operator, zero, "CPU")
        for level in ("O2", "O5"):
            for plain, written in zip(trained(level), trained(level, operator)):
                assert torch.equal(plain, written), (operator, level, plain, written)
"""


@pytest.mark.skipif(
    not kernels.has_native(torch.device("cpu")), reason="without compiled kernels gradients on a GPU are copied at once"
)
def test_writing_gradients_of_the_model_reaches_no_held_ones() -> None:
    command = [sys.executable, "-W", "ignore", "-c", AS_ON_A_GPU]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
