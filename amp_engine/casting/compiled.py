"""What Dynamo knows of torch's functions while they are patched, and when it may be asked."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from amp_engine.casting.replacements import ORIGINALS


@contextmanager
def dynamo_if_free() -> Iterator[bool]:
    """Whether no thread compiles, this one included; none begins inside."""
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    if lock is None:
        yield True
        return
    is_free = not lock._is_owned() and lock.acquire(blocking=False)
    try:
        yield is_free
    finally:
        if is_free:
            lock.release()


def discard_compiled() -> None:
    """Dynamo guards functions but not methods, operators and hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def know_originals() -> None:
    """Have Dynamo look torch's functions up, which it does by name and once, while they are the originals."""
    discard_compiled()
    trace_rules = importlib.import_module("torch._dynamo.trace_rules")
    trace_rules.get_tensor_method.cache_clear()
    known = trace_rules.get_torch_obj_rule_map()
    in_graph = trace_rules.TorchInGraphFunctionVariable
    if any(known.get(patched) is in_graph for patched, _ in ORIGINALS.values()):  # somebody had it look meanwhile
        trace_rules.get_torch_obj_rule_map.cache_clear()
        trace_rules.get_torch_obj_rule_map()
