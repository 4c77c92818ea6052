"""Dynamo's compiled code, its lock, and its tables of torch's functions, which must have the originals."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from amp_engine.casting.locks import held_if_free
from amp_engine.casting.replacements import ORIGINALS


def dynamo_if_free() -> AbstractContextManager[bool]:
    """Return a context that gives True if no thread, this one included, compiles; then none starts to inside of it."""
    lock = _compile_lock()
    if lock is None:
        return nullcontext(True)
    return nullcontext(False) if lock._is_owned() else held_if_free(lock)


def dynamo_at_rest() -> AbstractContextManager[Any]:
    """Return a context that waits until no other thread compiles; none starts to inside of it."""
    return _compile_lock() or nullcontext()


def _compile_lock() -> Any:
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


def discard_compiled() -> None:
    """Discard Dynamo's compiled code: its guards notice replaced functions, but not methods, operators and hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def know_originals() -> None:
    """Have Dynamo look up torch's functions, which it does once and by name, while the originals are in place."""
    trace_rules = importlib.import_module("torch._dynamo.trace_rules")
    trace_rules.get_tensor_method.cache_clear()
    known = trace_rules.get_torch_obj_rule_map()
    in_graph = trace_rules.TorchInGraphFunctionVariable
    if any(known.get(patched) is in_graph for patched, _ in ORIGINALS.values()):  # looked up while patched
        trace_rules.get_torch_obj_rule_map.cache_clear()
        trace_rules.get_torch_obj_rule_map()
