"""Locks that a forked child finds open, whatever the other threads of its parent were doing."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Of counts and lists that hold for all threads; held for a few statements. A fork waits for it: the child has only the
# thread that forked, and nobody there would open what another thread had closed.
shared = threading.RLock()
os.register_at_fork(before=shared.acquire, after_in_parent=shared.release, after_in_child=shared.release)


def is_shared_held_here() -> bool:
    """Whether this thread has `shared`. A finalizer may run in it then, and must wait for no other lock."""
    owned: bool = shared._is_owned()  # type: ignore[attr-defined]  # as threading.Condition asks
    return owned


class InstallLock:
    """Held while torch is patched, which waits for Dynamo: a fork, perhaps of Dynamo's, does not wait for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.was_held_by_another_thread = False  # in a forked child: when it was forked
        os.register_at_fork(after_in_child=self._renew)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nests within a thread."""
        with self._lock:
            yield

    @contextmanager
    def held_if_free(self) -> Iterator[bool]:
        """Whether it is held, which it is not where another thread has it."""
        lock = self._lock
        is_held = lock.acquire(blocking=False)
        try:
            yield is_held
        finally:
            if is_held:
                lock.release()

    def _renew(self) -> None:
        is_free_or_ours = self._lock.acquire(blocking=False)
        if is_free_or_ours:  # and if ours, this thread goes on with what it does under it
            self._lock.release()
        else:
            self._lock = threading.RLock()
        self.was_held_by_another_thread = not is_free_or_ours


install = InstallLock()
