"""How Dynamo treats our own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amp_engine.ground.torch_private import dynamo_frames


def part_of_a_graph(function: Callable[..., Any], compile_what_it_calls: bool = False) -> None:
    """Have Dynamo trace `function` where it is part of what is compiled, and not compile it alone.

    torch runs the hooks of a compiled model one by one outside of its graph, and would make a graph of each: two
    more to compile, and what a graph of its own does to the state of the thread is gone when the graph is made.
    """
    action = dynamo_frames._FrameAction
    inside = action.DEFAULT if compile_what_it_calls else action.SKIP
    dynamo_frames.set_code_exec_strategy(function.__code__, dynamo_frames._FrameExecStrategy(action.SKIP, inside))
