"""Bytes that a step sends and keeps on each rank, counted on ranks of Gloo: `python -m tests.benchmarks.ranks`.

Nothing is timed. Bytes are those of the tensors that collectives were called with; what of them goes over a link is
ring arithmetic, see docs/how_it_grows.md.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from amp_engine import amp
from tests.ranks import Messages, on_ranks

WIDTH, BLOCKS = 64, 6  # 6 x 64 x 64 parameters, which 2, 3, 4 and 6 ranks divide
CASES = (("DDP", "O0"), ("DDP", "O2"), ("FSDP2", "O0"), ("FSDP2", "O2"))


class Step(NamedTuple):
    """One training step on one rank.

    Attributes:
        params: of the whole model.
        sent: (collective, bytes of what is whole) in order, of forward, backward and step.
        kept: bytes of parameters, masters and moments on this rank, after the step.
    """

    params: int
    sent: list[tuple[str, int]]
    kept: int

    def link_bytes(self, ranks: int) -> float:
        """Bytes that a rank sends for a parameter, by rings; https://github.com/NVIDIA/nccl-tests PERFORMANCE.md."""
        share = (ranks - 1) / ranks
        return sum(n * share * (2 if "allreduce" in name else 1) for name, n in self.sent) / self.params


def step_of(kind: str, level: str) -> Step:
    """The third step of a model of linear layers, with AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    if kind == "FSDP2":
        for block in model:
            fully_shard(block, mp_policy=amp.fsdp_policy(level))
        fully_shard(model, mp_policy=amp.fsdp_policy(level, root=True))
    optimizer = torch.optim.AdamW(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wrapped: nn.Module = model
    if kind == "DDP":
        ddp = wrapped = DistributedDataParallel(model)
        ddp.register_comm_hook(None, _reduced)
    for _ in range(3):  # in the second DistributedDataParallel tells other ranks how it groups gradients
        with Messages() as seen:
            with amp.scale_loss(wrapped(torch.randn(4, WIDTH)).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    kept: dict[int, Tensor] = {id(t): t for t in (*model.parameters(), *amp.master_params(optimizer))}
    kept |= {id(v): v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim() > 0}
    params = sum(p.numel() for p in model.parameters())
    result = Step(params, seen.sent, sum(map(_bytes, kept.values())))
    ddp = wrapped = model
    amp.close()
    return result


def _reduced(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce as DistributedDataParallel does in C++ without a hook, where nothing of it is seen."""
    buffer: Tensor = bucket.buffer()
    work = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def steps(rank: int) -> dict[tuple[str, str], tuple[int, list[tuple[str, int]], int]]:
    """Return each case, as plain values."""
    return {case: tuple(step_of(*case)) for case in CASES}


# What a parameter takes of what is summed over all ranks, and of what is gathered or scattered once.
SUMMED = {"O0": 4, "O2": 2}
GATHERED = {"O0": 4 + 4 + 4, "O2": 2 + 2 + 4}
KEPT = {"O0": 4 + 8, "O2": 2 + 4 + 8}  # weight and AdamW's moments; at O2 the half weight beside its master
KEPT_IN_SHARDS = 4 + 8


def modelled(kind: str, level: str, ranks: int) -> tuple[float, float]:
    """Bytes that a rank sends, and keeps, for a parameter: rings, after Thakur, Rabenseifner and Gropp 2005."""
    share = (ranks - 1) / ranks
    if kind == "DDP":
        return 2 * share * SUMMED[level], KEPT[level]
    return share * GATHERED[level], KEPT_IN_SHARDS / ranks


def hops(ranks: int) -> int:
    """Messages after one another in a sum of few bytes by recursive doubling; the same source."""
    return math.ceil(math.log2(ranks))


def measured_table() -> list[str]:
    """Return the table that is counted on ranks of Gloo."""
    lines = []
    for ranks in (2, 4):
        results = on_ranks(steps, ranks)[0]
        for kind, level in CASES:
            step = Step(*results[kind, level])
            sent, kept = step.link_bytes(ranks), step.kept / step.params
            lines.append(f"| {ranks} | {kind} | {level} | {len(step.sent)} | {sent:.2f} | {kept:.2f} |")
    return lines


def modelled_table(params: float = 1e9) -> list[str]:
    """Return the table for a model of `params` parameters, in GB."""
    lines = []
    for ranks in (8, 64, 512, 4096):
        rows = [modelled(kind, "O2", ranks) for kind in ("DDP", "FSDP2")]
        cells = [f"{sent * params / 1e9:.2f} | {kept * params / 1e9:.3g}" for sent, kept in rows]
        lines.append(f"| {ranks} | {' | '.join(cells)} | {hops(ranks)} |")
    return lines


def main() -> None:
    """Print the tables of docs/how_it_grows.md."""
    print("\n".join([*measured_table(), "", *modelled_table()]))


if __name__ == "__main__":
    main()
