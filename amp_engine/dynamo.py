"""How Dynamo treats our own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._dynamo import eval_frame


def part_of_a_graph(function: Callable[..., Any]) -> None:
    """Have Dynamo trace `function` where it is part of what is compiled, and not compile it alone.

    torch runs the hooks of a compiled model one by one outside of its graph, and would make a graph of each: two
    more to compile, and what a graph of its own does to the state of the thread is gone when the graph is made.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
