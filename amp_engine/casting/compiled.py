"""Compiled code, which has its casts inside; Dynamo's lock, and its tables, which must have torch's originals."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.modules import rnn

from amp_engine.casting.patches import Patches
from amp_engine.casting.regions import casts_here, float_region
from amp_engine.casting.replacements import ORIGINALS
from amp_engine.ground.torch_private import c_extension, compiled_graph_caches, fake_kernels


def dynamo_at_rest() -> AbstractContextManager[Any]:
    """Return a context that waits until no other thread compiles; none starts to inside of it."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None) or nullcontext()


def discard_compiled() -> None:
    """Discard Dynamo's compiled code: its guards notice replaced functions, but not methods, operators and hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def know_originals() -> None:
    """Have Dynamo look up torch's functions, which it does once and by name, while the originals are in place."""
    trace_rules = importlib.import_module("torch._dynamo.trace_rules")
    trace_rules.get_tensor_method.cache_clear()
    importlib.import_module("torch._dynamo.variables.torch").get_overridable_functions()
    known = trace_rules.get_torch_obj_rule_map()
    in_graph = trace_rules.TorchInGraphFunctionVariable
    if any(known.get(patched) is in_graph for patched, _ in ORIGINALS.values()):  # looked up while patched
        trace_rules.get_torch_obj_rule_map.cache_clear()
        trace_rules.get_torch_obj_rule_map()


def compile_as_autocast(patches: Patches) -> None:
    """Have torch compile function casts as it compiles `torch.autocast`: into code that runs without them.

    Such code calls custom operators, and functions of torch that inductor took at its import, be they patched or not.
    """
    is_any_enabled = c_extension._is_any_autocast_enabled

    def is_any_autocast_enabled() -> bool:
        # nn.RNN asks too, before it compares types.
        asked_by_rnn = not torch.compiler.is_dynamo_compiling() and sys._getframe(1).f_globals is vars(rnn)
        return is_any_enabled() if asked_by_rnn else True

    patches.set(c_extension, "_is_any_autocast_enabled", is_any_autocast_enabled)
    for owner, name in ((c_extension, "_DisableAutocast"), (fake_kernels, "set_ctx_getter")):
        patches.set(owner, name, _in_float_region(getattr(owner, name)))
    for cache in compiled_graph_caches:  # they know a method by its name, whatever it casts
        patches.set(cache, "env_value_force", False)


def _in_float_region(context: Callable[..., AbstractContextManager[Any]]) -> type:
    class InFloatRegion:
        """Is `context`, and within it a float region where functions are cast."""

        def __init__(self, *args: Any) -> None:
            self._contexts = context(*args), float_region() if casts_here() else nullcontext()

        def __enter__(self) -> None:
            for each in self._contexts:
                each.__enter__()

        def __exit__(self, *error: Any) -> None:
            for each in reversed(self._contexts):
                each.__exit__(*error)

    return InFloatRegion
