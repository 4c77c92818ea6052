"""An architecture in a process of its own: a crash, a hang or too much memory ends that process alone."""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 200
MEMORY = 8 << 30


def in_processes(architectures: Sequence[str], workers: int) -> Iterator[dict[str, Any]]:
    """Rows, as they are measured."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.zoo.preload"])
    with ThreadPoolExecutor(workers) as pool:
        for future in as_completed(pool.submit(_in_process, context, name) for name in architectures):
            yield future.result()


def _in_process(context: Any, architecture: str) -> dict[str, Any]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(architecture, sender), daemon=True)
    started = time.monotonic()
    process.start()
    sender.close()
    try:
        row = json.loads(receiver.recv()) if receiver.poll(SECONDS) else {"error": f"stopped after {SECONDS} s"}
    except EOFError:
        process.join(5)
        row = {"error": f"its process ended with {process.exitcode}"}
    process.kill()
    process.join()
    return {"architecture": architecture, **row, "seconds": time.monotonic() - started}


def _measure(architecture: str, sender: Connection) -> None:
    import torch

    from tests.zoo.architectures import measured

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    sender.send(json.dumps(measured(architecture)))
