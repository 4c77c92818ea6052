"""O1: run listed functions in a chosen type."""

from amp_engine.casting.engine_casts import EngineCasts as EngineCasts
from amp_engine.casting.function_casts import FunctionCasts as FunctionCasts
from amp_engine.casting.keep_float import discard_interrupted as discard_interrupted
from amp_engine.casting.keep_float import keep_float as keep_float
from amp_engine.casting.original import original as original
from amp_engine.casting.registration import Registration as Registration
from amp_engine.casting.wrappers import deferred as deferred
