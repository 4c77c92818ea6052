"""The argument `policy` of `initialize`, a file or a RunPolicy, completes the other arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from amp_engine.ground.tools import tool


def takes_policy(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `initialize` so that the policy among its arguments completes the others.

    Only a decorator knows which arguments were passed: the method itself also sees defaults.
    """
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def with_policy(*args: Any, **keywords: Any) -> Any:
        if keywords.get("policy") is None or not keywords.get("enabled", True):
            return initialize(*args, **keywords)
        bound = signature.bind(*args, **keywords)
        if bound.arguments.get("enabled", True):
            policy_file = tool("policy_file")
            level, others, names = policy_file.completed(bound.arguments)
            bound.arguments = {**others, "opt_level": level, "policy": policy_file.RunPolicy(level, names)}
        return initialize(*bound.args, **bound.kwargs)

    return with_policy
