"""Recommends a level: runs a script for a few steps at each level, and compares the figures."""

from amp_engine.tools.advice.advice import Advice as Advice
from amp_engine.tools.advice.running import advise as advise
