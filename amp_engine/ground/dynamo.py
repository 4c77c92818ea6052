"""Sets how Dynamo treats our own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amp_engine.ground.torch_private import dynamo_frames


def part_of_a_graph(function: Callable[..., Any], compile_what_it_calls: bool = False) -> None:
    """Have Dynamo trace `function` as part of compiled code, but never compile it alone.

    torch runs the hooks of a compiled model one by one outside of its graph, and would make a graph of each: it would
    compile two more graphs, and lose the changes that a hook makes to the state of the thread.
    """
    action = dynamo_frames._FrameAction
    inside = action.DEFAULT if compile_what_it_calls else action.SKIP
    dynamo_frames.set_code_exec_strategy(function.__code__, dynamo_frames._FrameExecStrategy(action.SKIP, inside))
