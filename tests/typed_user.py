"""What type checkers are to know of amp_engine: checked by `make lint`, never run."""

from torch import Tensor, nn
from torch.optim import SGD, Adam
from typing_extensions import assert_type

from amp_engine import Engine, amp


def one(model: nn.Linear, optimizer: SGD) -> None:
    """A model keeps its class, and an optimizer too."""
    assert_type(amp.initialize(model), nn.Linear)
    assert_type(amp.initialize(model, opt_level="O3"), nn.Linear)
    assert_type(amp.initialize(model, optimizer), tuple[nn.Linear, SGD])
    assert_type(amp.initialize(model, optimizer, True, "O2", loss_scale="dynamic"), tuple[nn.Linear, SGD])
    assert_type(Engine().initialize(model, optimizer, opt_level="O5"), tuple[nn.Linear, SGD])


def several(models: list[nn.Linear], optimizers: list[SGD | Adam], optimizer: Adam) -> None:
    """So do lists."""
    assert_type(amp.initialize(models), list[nn.Linear])
    assert_type(amp.initialize(models, optimizer), tuple[list[nn.Linear], Adam])
    assert_type(amp.initialize(models, optimizers), tuple[list[nn.Linear], list[SGD | Adam]])


def train(model: nn.Linear, optimizer: SGD, loss: Tensor) -> None:
    """The loop."""
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert_type(scaled_loss, Tensor)
    assert_type(amp.clip_grad_norm_(optimizer, max_norm=1.0), Tensor)
    assert_type(list(amp.master_params(optimizer)), list[nn.Parameter])
    assert_type(amp.keep_float(model), nn.Linear)
