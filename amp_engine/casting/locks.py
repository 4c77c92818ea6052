"""Locks that a forked child finds open, even if another thread of its parent held them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Guards counts and lists that threads share; held for a few statements. A fork waits for it: the child has only the
# thread that forked, so nothing there could release a lock that another thread held.
shared = threading.RLock()
os.register_at_fork(before=shared.acquire, after_in_parent=shared.release, after_in_child=shared.release)


def is_shared_held_here() -> bool:
    """True if this thread holds `shared`. A finalizer that runs meanwhile must not wait for another lock."""
    owned: bool = shared._is_owned()  # type: ignore[attr-defined]  # as threading.Condition does
    return owned


@contextmanager
def held_if_free(lock: Any) -> Iterator[bool]:
    """Hold `lock` inside of the context and give True; give False if another thread holds it."""
    is_held = lock.acquire(blocking=False)
    try:
        yield is_held
    finally:
        if is_held:
            lock.release()


class InstallLock:
    """A lock that is held while torch is patched. Forks, also Dynamo's, do not wait: its holder may wait for Dynamo."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.was_held_by_another_thread = False  # in a forked child: at the fork
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        is_free_or_ours = self.lock.acquire(blocking=False)
        if is_free_or_ours:  # if this thread holds it, it still does
            self.lock.release()
        else:
            self.lock = threading.RLock()
        self.was_held_by_another_thread = not is_free_or_ours


install = InstallLock()
