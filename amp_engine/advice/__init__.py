"""Recommends a level: a script runs for a few steps at each, and the figures are compared."""

from amp_engine.advice.advice import Advice as Advice
from amp_engine.advice.running import advise as advise
