"""A ghost can be stepped and nothing of its optimizer moves."""

import pickle
import threading
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amp_engine.stepping.ghost import ghost, shadow


class Counts(torch.optim.SGD):
    """Keeps counts in every place that an optimizer can."""

    __slots__ = ("slot",)

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.number, self.scalar, self.entries, self.table = 0, torch.zeros(()), [], {"n": 0}
        self.slot = 0
        self.state["global"] = {"n": torch.zeros(())}
        self.param_groups[0]["k"] = 0
        self.param_groups[0]["d"] = torch.zeros(())
        self.param_groups[0]["lock"] = threading.Lock()

    def step(self, closure=None):
        self.number += 1
        self.scalar += 1
        self.slot += 1
        self.entries.append(1)
        self.table["n"] += 1
        self.state["global"]["n"] += 1
        self.param_groups[0]["k"] += 1
        self.param_groups[0]["d"] += 1
        return super().step()

    def counts(self):
        group = self.param_groups[0]
        places = [self.number, self.scalar, self.slot, len(self.entries), self.table["n"], self.state["global"]["n"]]
        return [int(count) for count in [*places, group["k"], group["d"]]]


@pytest.mark.parametrize("stand_ins", [False, True])
def test_stepping_a_ghost_moves_no_count(stand_ins):
    optimizer = Counts([nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    ghost(optimizer, stand_ins).step()
    assert optimizer.counts() == [0] * 8
    assert optimizer.param_groups[0]["params"][0].tolist() == [1.0] * 3
    optimizer.step()
    assert optimizer.counts() == [1] * 8


def test_a_ghost_is_one_of_the_same_class_and_has_the_settings():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.3)
    double = ghost(optimizer)
    assert isinstance(double, torch.optim.AdamW)
    assert type(double).__name__ == "AdamW"
    assert double.param_groups[0]["lr"] == 0.3
    assert double.param_groups[0]["params"] == []


def test_a_ghost_runs_no_hooks():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.3)
    ran = deque()
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    ghost(optimizer).step()
    assert not ran


def test_a_learning_rate_with_a_graph_is_copied_without_it():
    lr = torch.tensor(0.1, requires_grad=True) * 2
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.3)
    optimizer.param_groups[0]["lr"] = lr
    assert not ghost(optimizer).param_groups[0]["lr"].requires_grad


def test_optimizers_inside_are_ghosts_too():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.3)
    optimizer.inner = torch.optim.SGD(optimizer.param_groups, lr=0.3)
    double = ghost(optimizer)
    assert double.inner is not optimizer.inner
    assert double.inner.param_groups[0]["params"] == []


def test_a_shadow_steps_the_parameters_that_it_is_given():
    class Kept(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.5, momentum=0.9)
            self.first, self.all, self.places = params[0], list(params), {params[1]: torch.zeros(1)}

        def step(self, closure=None):
            super().step()
            self.places[self.all[1]] += 1
            with torch.no_grad():
                self.first.mul_(2)

    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    twins = {id(p): nn.Parameter(torch.full((2,), 3.0)) for p in params}
    for p in (*params, *twins.values()):
        p.grad = torch.ones(2)
    optimizer = Kept(params)
    optimizer.step()
    before = [p.tolist() for p in params], float(optimizer.places[params[1]])
    double = shadow(optimizer, twins)
    double.step()
    assert ([p.tolist() for p in params], float(optimizer.places[params[1]])) == before
    momentum = 0.9 * 1 + 1
    first, second = twins.values()
    assert first.tolist() == pytest.approx([2 * (3 - 0.5 * momentum)] * 2)
    assert second.tolist() == pytest.approx([3 - 0.5 * momentum] * 2)
    assert float(double.places[second]) == 2
    assert optimizer.state[params[0]]["momentum_buffer"].tolist() == [1.0, 1.0]


def test_a_loaded_optimizer_is_not_said_to_be_capturable(monkeypatch):
    """torch warns of groups that are all capturable, of none too, unless it knows from the constructor."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=0.1)
    double = ghost(pickle.loads(pickle.dumps(optimizer)))
    double.param_groups = []
    stream = SimpleNamespace(is_capturing=lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *args: stream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    double.step()
