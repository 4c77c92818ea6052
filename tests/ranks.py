"""A function on several processes of one group of torch.distributed, without a file: what a rank returns, or raises."""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# Ranks are forks of a process that has imported what they need and done nothing else: an import takes seconds of them.
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(
    ["pytest", "tests.models", "tests.support", "torch.distributed.fsdp", "torch.distributed.tensor", "tests.ranks"]
)

# Seconds; the slowest test takes 60 on a busy machine, and `make stress` gives it so many STEPS.
HANGS = 250 if "STEPS" not in os.environ else 7200


def on_ranks(run: Callable[[int], Any], ranks: int) -> list[Any]:
    """
    Return the results of run(rank) on the ranks, which are fresh processes on one thread of torch each.

    run:   a function of a module, since the processes import it by name. What it returns goes through torch.save.
    """
    try:
        return _on_ranks(run, ranks)
    except TimeoutError:
        # Once in hundreds of runs torch 2.13 never leaves gloo::transport::tcp::UnboundBuffer's destructor, after an
        # all-gather. What hangs by our fault hangs again.
        return _on_ranks(run, ranks)


def _on_ranks(run: Callable[[int], Any], ranks: int) -> list[Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that is free
    # Each rank waits for the others, so no process gets two.
    with ProcessPoolExecutor(ranks, FRESH) as processes:
        results = [processes.submit(_on_rank, run, rank, ranks, store.port) for rank in range(ranks)]
        try:
            return [torch.load(io.BytesIO(result.result(HANGS)), weights_only=False) for result in results]
        except TimeoutError:
            for process in processes._processes.values():
                process.kill()
            raise


def _on_rank(run: Callable[[int], Any], rank: int, ranks: int, port: int) -> bytes:
    faulthandler.dump_traceback_later(HANGS - 10)
    gc.freeze()  # imported objects: collections need not look through them
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    try:
        result = run(rank)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    written = io.BytesIO()
    torch.save(result, written)
    return written.getvalue()


class Messages(TorchDispatchMode):
    """Collectives, with the bytes of what is whole, and values that the host asked for.

    Of a gather that is what comes out, of a scatter what goes in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []
        self.asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.sent.append((func._schema.name, max(map(_bytes, args[:2]))))
        self.asked += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _bytes(argument: Any) -> int:
    """Return the bytes of a tensor, or a list of tensors; 0 for anything else."""
    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    return sum(map(_bytes, argument)) if isinstance(argument, (list, tuple)) else 0
