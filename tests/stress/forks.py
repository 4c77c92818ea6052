"""Forks in the midst of what other threads do: `make stress ROUNDS=2000`. See threads.py."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from amp_engine.casting import FunctionCasts
from tests.stress.support import ROUNDS, WAIT

X = torch.eye(4)


@pytest.fixture
def casts() -> Iterator[FunctionCasts]:
    casts = FunctionCasts(torch.bfloat16)
    casts.install()
    yield casts
    casts.remove()


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer's own locks are not opened in a fork"
)
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_fork_while_other_threads_call_patched_functions_does_not_hang(casts: FunctionCasts) -> None:
    """No lock of the casts may be held by a thread that the child does not have."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            for _ in range(100):  # short and often: each takes the lock twice
                with casts.disabled():
                    pass
            torch.mm(X, X)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(ROUNDS):
            pid = os.fork()
            if pid == 0:
                signal.alarm(int(WAIT))  # ends a child that waits for ever
                with casts.disabled():
                    full = torch.mm(X, X).dtype == torch.float32
                os._exit(0 if full else 1)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        done.set()
        for thread in threads:
            thread.join(WAIT)
