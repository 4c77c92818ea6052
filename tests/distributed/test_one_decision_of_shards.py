"""An overflow in one shard is one decision of all ranks, and a norm counts what every rank has once."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from amp_engine import AmpStateError, amp
from tests.ranks import Messages, on_ranks
from tests.support import scaler_numbers

STEPS = int(os.environ.get("STEPS", "20"))  # 200 in make stress
MAX_NORM = 0.25


class Net(nn.Module):
    """Odd sizes, so that three ranks have uneven shards and some have none of a bias; [B, T, 9] -> [B, T, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(9)
        self.a = nn.Linear(9, 10)
        self.b = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.norm(x)).tanh())


def base() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def units(level: str, mesh: Any = None) -> nn.Module:
    model = base().half() if level == "O3" else base()
    for unit in (model.a, model.b):
        fully_shard(unit, mesh=mesh, mp_policy=amp.fsdp_policy(level))  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh, mp_policy=amp.fsdp_policy(level, root=True))


def hybrid(level: str) -> nn.Module:
    return units(level, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def two_dimensions(level: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = base()
    plan = {"norm": SequenceParallel(), "a": ColwiseParallel(), "b": RowwiseParallel()}
    plan["a"].input_layouts = (SequenceParallel().sequence_sharding,)  # type: ignore[attr-defined]
    parallelize_module(model, mesh["tp"], plan)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh["dp"], mp_policy=amp.fsdp_policy(level, root=True))


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # 1e-8 is 0 in float16, for O3


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def batch(index: int) -> Tensor:
    return torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(index))


def trained(model: nn.Module, optimizer: Any, steps: int, data_rank: int, inside: Any = None) -> dict[str, Any]:
    """Steps of which a tenth are poisoned in one local shard of a rank; norms beside those of whole gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    events, skips, poisoned, norms = random.Random(5), 0, 0, []
    own = random.Random(rank)
    for index in range(steps):
        is_bad, who, value = events.random() < 0.1, events.randrange(ranks), events.choice([math.inf, math.nan])
        loss = model(batch(index * ranks + data_rank)).float().square().mean()
        with amp.scale_loss(loss, inside or optimizer) as scaled_loss:
            scaled_loss.backward()
            if is_bad and who == rank:
                stepped = [p for group in (inside or optimizer).param_groups for p in group["params"]]
                shards = [g for p in stepped if p.grad is not None and (g := local(p.grad)).numel()]
                own.choice(shards).view(-1)[0] = value
        poisoned += is_bad
        if index % 4 == 0 and not is_bad and any(isinstance(p, DTensor) for p in model.parameters()):
            whole = [p.grad.full_tensor().double() for p in model.parameters() if isinstance(p.grad, DTensor)]
            norm = amp.clip_grad_norm_(optimizer, MAX_NORM)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            norms.append((float(norm), math.sqrt(sum(float(g.square().sum()) for g in whole))))
        optimizer.step()
        skips += amp.current_engine().step_was_skipped(inside or optimizer)
        optimizer.zero_grad()
    result = {"scale": scaler_numbers(), "skips": skips, "poisoned": poisoned, "norms": norms}
    steps_taken = {float(local(state["step"])) for state in (inside or optimizer).state.values()}
    result["steps"] = sorted(steps_taken)
    result["finite"] = all(bool(local(p.detach()).isfinite().all()) for p in model.parameters())
    return result


def whole(model: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor().clone() for p in model.parameters() if isinstance(p, DTensor)]


def sharded(make: Callable[[str], nn.Module], level: str) -> dict[str, Any]:
    model = make(level)
    optimizer = adamw(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
    # Ranks of one tensor-parallel group have the same batch.
    data_rank = dist.get_rank() // 2 if make is two_dimensions else dist.get_rank()
    result = trained(model, optimizer, STEPS, data_rank)
    result["weights"] = whole(model)
    result["sent"] = sent(model, optimizer, data_rank)
    amp.close()
    return result


def sent(model: nn.Module, optimizer: Any, data_rank: int) -> list[tuple[str, int]]:
    """Return what one rank sends from the exit of `scale_loss` to the end of the step."""
    seen = Messages()
    with ExitStack() as counted:
        with amp.scale_loss(model(batch(data_rank)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
            counted.enter_context(seen)
        optimizer.step()
    return seen.sent


def fsdp1() -> dict[str, Any]:
    model = FullyShardedDataParallel(base(), device_id=torch.device("cpu"))
    optimizer = adamw(model)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, process_group=dist.group.WORLD)
    result = trained(model, optimizer, STEPS, dist.get_rank())
    with amp.scale_loss(model(batch(dist.get_rank())).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(AmpStateError, match=r"Call model\.clip_grad_norm_\(0\.25\) of the wrapper"):
        amp.clip_grad_norm_(optimizer, MAX_NORM)
    square = torch.stack([p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]).sum()
    dist.all_reduce(square)
    result["norms"].append((float(model.clip_grad_norm_(MAX_NORM)), float(square.sqrt())))
    amp.close()
    return result


def zero() -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # a module that warns, where warnings are errors

    model = base()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    amp.initialize(model, optimizer.optim, opt_level="O1", verbosity=0, process_group=dist.group.WORLD)
    ddp = DistributedDataParallel(model)
    result = trained(ddp, optimizer, STEPS, dist.get_rank(), optimizer.optim)
    result["weights"] = [p.detach().clone() for p in model.parameters()]
    del ddp
    amp.close()
    return result


def stages(level: str) -> dict[str, Any]:
    """Two stages of a pipeline, a rank each: activations go one way, their gradients the other."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh()) if rank == 0 else nn.Linear(8, 4)
    optimizer = adamw(stage)
    amp.initialize(stage, optimizer, opt_level=level, verbosity=0, process_group=dist.group.WORLD)
    norms, skips = [], 0
    for index in range(12):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(index))
        if rank == 0:
            sent = stage(x).float()
            dist.send(sent.detach(), 1)
            received = torch.empty_like(sent)
            loss = sent.sum()  # stands for the loss of the last stage, which has the scale
        else:
            received = torch.empty(6, 8)
            dist.recv(received, 0)
            received.requires_grad_()
            loss = stage(received).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            if rank == 0:
                dist.recv(received, 1)
                sent.backward(received)
            else:
                scaled_loss.backward()
                assert received.grad is not None
                dist.send(received.grad, 0)
            if index in (3, 7) and rank == index // 7:  # each stage once
                next(p for p in stage.parameters() if p.grad is not None).grad.view(-1)[0] = math.inf
        if index not in (3, 7):
            own = [p.grad.double() for p in amp.master_params(optimizer)] if index == 5 else []
            norm = amp.clip_grad_norm_(optimizer, MAX_NORM)
            if own:
                square = torch.stack([g.square().sum() for g in own]).sum()
                dist.all_reduce(square)
                norms.append((float(norm), float(square.sqrt())))
            else:
                norms.append((float(norm), float(norm)))
        optimizer.step()
        skips += amp.current_engine().step_was_skipped(optimizer)
        optimizer.zero_grad()
    result = {"scale": scaler_numbers(), "skips": skips, "poisoned": 2, "norms": norms, "finite": True}
    amp.close()
    return result


TWO: dict[str, Callable[[], Any]] = {
    "FSDP2 O1": lambda: sharded(units, "O1"),
    "FSDP2 O2": lambda: sharded(units, "O2"),
    "FSDP2 O3": lambda: sharded(units, "O3"),
    "FSDP2 O5": lambda: sharded(units, "O5"),
    "FSDP1 O1": fsdp1,
    "ZeRO O1": zero,
    "pipeline O1": lambda: stages("O1"),
    "pipeline O2": lambda: stages("O2"),
}
THREE: dict[str, Callable[[], Any]] = {
    "FSDP2 O1 uneven": lambda: sharded(units, "O1"),
    "FSDP2 O2 uneven": lambda: sharded(units, "O2"),
}
FOUR: dict[str, Callable[[], Any]] = {
    "HSDP O2": lambda: sharded(hybrid, "O2"),
    "dp x tp O1": lambda: sharded(two_dimensions, "O1"),
}
PROGRAMS = {2: TWO, 3: THREE, 4: FOUR}


def run_cases(rank: int) -> dict[str, Any]:
    return {name: run() for name, run in PROGRAMS[dist.get_world_size()].items()}


_results: dict[int, list[dict[str, Any]]] = {}


def on(count: int) -> list[dict[str, Any]]:
    if count not in _results:
        _results[count] = on_ranks(run_cases, count)
    return _results[count]


@pytest.mark.parametrize(("count", "name"), [(count, name) for count, names in PROGRAMS.items() for name in names])
def test_shards_stay_together(count: int, name: str) -> None:
    first, *others = (results[name] for results in on(count))
    for other in others:
        for key in ("scale", "skips", "poisoned", "norms"):
            assert other[key] == first[key], key
        assert other.get("steps") == first.get("steps")
        for ours, theirs in zip(other.get("weights", []), first.get("weights", []), strict=True):
            assert torch.equal(ours, theirs)
    assert all(results[name]["finite"] for results in on(count))
    assert first["skips"] >= first["poisoned"] > 0
    for norm, expected in first["norms"]:
        assert norm == pytest.approx(expected, rel=1e-2 if name.endswith("O3") else 1e-5)
    assert len(first["norms"]) < 2 or any(norm > MAX_NORM for norm, _ in first["norms"])  # so clipping is active
    one_message = [("c10d::allreduce_", 16 * count)]
    for results in on(count):
        assert results[name].get("sent", one_message) == one_message
