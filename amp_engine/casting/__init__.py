"""O1: run listed functions in a chosen type."""

from amp_engine.casting.function_casts import FunctionCasts as FunctionCasts
from amp_engine.casting.patcher import Registration as Registration
from amp_engine.casting.wrappers import deferred as deferred

__all__ = ["FunctionCasts", "Registration", "deferred"]
