"""Calls whose types type checkers must know: checked by `make lint`, never run."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import SGD, Adam
from typing_extensions import assert_type

from amp_engine import Engine, amp
from amp_engine.tools.telemetry.comparison import LevelComparison
from amp_engine.tools.telemetry.receipt import Receipt


def one(model: nn.Linear, optimizer: SGD) -> None:
    """A model keeps its class, and an optimizer too."""
    assert_type(amp.initialize(model), nn.Linear)
    assert_type(amp.initialize(model, opt_level="O3"), nn.Linear)
    assert_type(amp.initialize(model, optimizer), tuple[nn.Linear, SGD])
    assert_type(amp.initialize(model, optimizer, True, "O2", loss_scale="dynamic"), tuple[nn.Linear, SGD])
    assert_type(Engine().initialize(model, optimizer, opt_level="O5"), tuple[nn.Linear, SGD])


def several(models: list[nn.Linear], optimizers: list[SGD | Adam], optimizer: Adam) -> None:
    """Lists keep their types, too."""
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


def save(model: nn.Linear, optimizer: SGD) -> None:
    """Checkpoints."""
    amp.save("path", model=model, optimizer=optimizer, epoch=3)
    assert_type(amp.load("path", model=model, optimizer=optimizer), dict[str, Any])
    assert_type(amp.state_dict(format="torch"), OrderedDict[str, Any])
    assert_type(amp.convert_state_dict({}, "apex"), OrderedDict[str, Any])
    assert_type(dict(amp.named_masters(model)), dict[str, nn.Parameter])
    assert_type(amp.export_state_dict(model, torch.bfloat16), OrderedDict[str, Any])
    state: Stateful = amp.training_state(model, optimizer)
    state.load_state_dict({})


def look() -> None:
    """Read what a run tells about itself."""
    with amp.explain() as explanation, amp.step_times() as times:
        pass
    assert_type(amp.receipt(), Receipt)
    receipt = amp.receipt(explanation, times=times)
    assert_type(receipt.memory[0].bytes, int)
    assert_type(receipt.to_json(), str)
    assert_type(amp.scalars(), dict[str, float])
    histogram = amp.gradient_histogram(lambda: None)
    assert_type(histogram.lost(1.0), float)
    assert_type(amp.receipt(gradients=histogram), Receipt)
    with amp.watch_gradients(every=10) as watch:
        pass
    assert_type([record.norm for record in watch.records], list[float])
    with amp.audit_updates([], every=10) as audit:
        pass
    assert_type(amp.receipt(updates=audit), Receipt)
    assert_type([one.erased for one in audit.measured().tensors], list[float])


def compare(model: nn.Linear, optimizer: SGD, x: Tensor) -> None:
    """Levels beside each other, and policies."""
    assert_type(amp.compare_levels(model, lambda model: model(x).sum(), "O2"), LevelComparison)
    found = amp.find_fp32_modules(model, lambda model: model(x).sum(), "O5", tolerance=0.1)
    assert_type(found.modules, tuple[str, ...])
    assert_type(found.policy, amp.RunPolicy)
    found.save("policy.json")
    assert_type(amp.initialize(model, optimizer, policy="policy.json"), tuple[nn.Linear, SGD])
    policy = amp.RunPolicy("O2", keep_float=["head"], loss_scale=128.0)
    assert_type(amp.initialize(model, policy=policy), nn.Linear)
