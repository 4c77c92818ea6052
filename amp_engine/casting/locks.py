"""Locks of the casts."""

import os
import threading

install = threading.RLock()
"""Held while torch is patched, and while an engine initializes or closes: one thread at a time."""

shared = threading.RLock()
"""Guards counts and lists that threads share; held for a few statements.

A fork waits for it: the child has only the thread that forked, so nothing there could release a lock that another
thread held.
"""
os.register_at_fork(before=shared.acquire, after_in_parent=shared.release, after_in_child=shared.release)
