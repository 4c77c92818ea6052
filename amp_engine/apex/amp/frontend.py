"""`apex.amp.frontend`: the optimization levels as callables, and the properties that they set."""

import dataclasses

from amp_engine.amp import initialize as initialize
from amp_engine.amp import load_state_dict as load_state_dict
from amp_engine.amp import state_dict as state_dict
from amp_engine.apex_private.views import Properties as Properties
from amp_engine.levels.levels import BRIEFS, LEVELS
from amp_engine.levels.policy import Policy


@dataclasses.dataclass(frozen=True)
class OptLevel:
    """An optimization level, called to set properties.

    Attributes:
        brief: the line that `initialize` prints about it.
        policy: holds its properties.
    """

    brief: str
    policy: Policy

    def __call__(self, properties: Properties) -> Properties:
        """Set all `properties` to the defaults of this level, and return them."""
        properties.become(self.policy)
        return properties


opt_levels = {name: OptLevel(BRIEFS[name], policy) for name, policy in LEVELS.items()}
