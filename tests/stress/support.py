"""Threads that run at once, as often as ROUNDS says."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

ROUNDS = int(os.environ.get("ROUNDS", "20"))
WAIT = 60.0  # seconds until a deadlock is called one


@contextmanager
def busy_switching() -> Iterator[None]:
    """Threads take turns a thousand times as often as by default."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def in_threads(*targets: Callable[[], Any]) -> list[Any]:
    """Results of functions that start at once, each in a thread of its own; the first error is raised here."""
    barrier = threading.Barrier(len(targets))

    def run(target: Callable[[], Any]) -> Any:
        barrier.wait(WAIT)
        return target()

    with busy_switching(), ThreadPoolExecutor(len(targets)) as pool:
        futures = [pool.submit(run, target) for target in targets]
        return [future.result(WAIT) for future in futures]


def times(count: int, run: Callable[[], Any]) -> Callable[[], None]:
    """`run`, a fixed number of times: no thread waits for another's luck."""

    def repeat() -> None:
        for _ in range(count):
            run()

    return repeat
