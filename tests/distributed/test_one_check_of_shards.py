"""The exit of `scale_loss` checks all shards of a rank at once, however many there are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from amp_engine import amp, kernels
from tests.ranks import on_ranks

LEVELS = ("O1", "O2", "O5")


class Operations(TorchDispatchMode):
    """Counts what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace != "c10d"
        return func(*args, **(kwargs or {}))


def sharded(model: nn.Sequential, level: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    for part in model:
        fully_shard(part, mp_policy=amp.fsdp_policy(level))
    fully_shard(model, mp_policy=amp.fsdp_policy(level, root=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **{"loss_scale": 4.0, **options})
    return model, optimizer


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def batch(rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def exit_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> int:
    """Return how many operations the exit takes."""
    seen = Operations()
    with amp.scale_loss(model(batch(rank)).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
        seen.__enter__()
    seen.__exit__(None, None, None)
    return seen.count


def counts(rank: int) -> dict[Any, list[int]]:
    """Return for each level the operations of an exit, and of one that adds to earlier gradients, by layers."""
    found: dict[Any, list[int]] = {}
    for level in LEVELS:
        for count in (2, 9):
            model, optimizer = sharded(layers(count), level)
            for times in (1, 2):
                for _ in range(times):
                    operations = exit_of(model, optimizer, rank)
                found.setdefault((level, times), []).append(operations)
                optimizer.step()
                optimizer.zero_grad()
            amp.close()
    return found


class Scaling(nn.Module):
    """A layer that computes in the type of its parameters, and is not cast; [B, 8] float32 -> the same."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 8, dtype=dtype))
        self.bias = nn.Parameter(torch.linspace(-1, 1, 8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight + self.bias).float()


def of_two_types() -> nn.Sequential:
    return nn.Sequential(Scaling(torch.float32), Scaling(torch.float64), Scaling(torch.float32))


def norms(rank: int) -> list[float | None]:
    """The norms that are told of a step that is taken, and of one that is skipped."""
    model, optimizer = sharded(layers(2), "O1", loss_scale="dynamic")
    found = []
    for factor in (1.0, math.inf):
        with amp.scale_loss(model(batch(rank)).float().square().mean(), optimizer) as scaled_loss:
            (scaled_loss * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(amp.last_step().norm)
    amp.close()
    return found


def on_one_of_two(rank: int) -> Any:
    return counts(rank), norms(rank)


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return on_ranks(on_one_of_two, 2)


needs_kernels = pytest.mark.skipif(
    not kernels.has_native(torch.device("cpu")), reason="plain PyTorch computes a list by several operations a tensor"
)


def assert_no_more_for_more(found: dict[Any, list[int]]) -> None:
    assert len(found) == 2 * len(LEVELS)
    for case, (few, many) in found.items():
        assert few == many < 30, case


@needs_kernels
@pytest.mark.usefixtures("one_process_group")
def test_the_exit_takes_no_more_operations_for_more_shards() -> None:
    assert_no_more_for_more(counts(0))


@needs_kernels
def test_the_exit_takes_no_more_operations_for_more_shards_on_two_ranks(ranks: list[Any]) -> None:
    for found, _ in ranks:
        assert_no_more_for_more(found)


@pytest.mark.usefixtures("one_process_group")
def test_shards_that_the_kernels_do_not_take_are_unscaled_beside_others() -> None:
    plain = of_two_types()
    plain(batch(0)).square().mean().backward()
    model, optimizer = sharded(of_two_types(), "O1")
    with amp.scale_loss(model(batch(0)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_shard_that_is_not_finite_is_named(value: float) -> None:
    model, optimizer = sharded(layers(4), "O1", loss_scale="dynamic")
    with amp.scale_loss(model(batch(0)).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
        model.get_submodule("2").bias.grad.to_local()[3] = value  # type: ignore[union-attr, operator]
    optimizer.step()
    (record,) = amp.overflow_report()
    assert record.skipped
    assert record.parameter == "2.bias"
    assert record.kind == ("nan" if math.isnan(value) else "inf")


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("freezes", [False, True])
def test_parameters_of_the_root_are_trained_while_they_are_whole(freezes: bool) -> None:
    model = layers(2)
    model[0].requires_grad_(not freezes)
    fully_shard(model, mp_policy=amp.fsdp_policy("O5", root=True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    for _ in range(2):
        with amp.scale_loss((model(batch(0)) * torch.tensor(math.nan)).square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    record = amp.overflow_report()[1]
    assert record.cause == "data"
    assert record.untrained == (("0.weight", "0.bias") if freezes else ())


def test_no_norm_is_told_that_no_rank_knows(ranks: list[Any]) -> None:
    for _, found in ranks:
        assert found == [None, math.inf]
