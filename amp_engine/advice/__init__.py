"""Which level to take: a script is run for a few steps at each, and the figures are compared."""

from amp_engine.advice.advice import Advice as Advice
from amp_engine.advice.running import advise as advise
