"""amp_engine: the successor of apex.amp on today's PyTorch.

from amp_engine import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""

from typing import TYPE_CHECKING

from amp_engine import amp as amp
from amp_engine.amp import _amp_state as _amp_state
from amp_engine.engine import Engine as Engine
from amp_engine.errors import AmpError as AmpError
from amp_engine.errors import AmpFileError as AmpFileError
from amp_engine.errors import AmpGradientWarning as AmpGradientWarning
from amp_engine.errors import AmpIndexError as AmpIndexError
from amp_engine.errors import AmpRuntimeWarning as AmpRuntimeWarning
from amp_engine.errors import AmpStateError as AmpStateError
from amp_engine.errors import AmpTypeError as AmpTypeError
from amp_engine.errors import AmpValueError as AmpValueError
from amp_engine.errors import AmpWarning as AmpWarning
from amp_engine.levels.policy import Policy as Policy

if TYPE_CHECKING:
    from amp_engine.amp import *  # noqa: F403
else:
    globals().update({name: value for name, value in vars(amp).items() if name in amp.__all__})

    def __getattr__(name: str) -> object:
        """A name of `amp`, whose tools are loaded when they are first asked for."""
        if name in amp.__all__:
            return getattr(amp, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "AmpError",
    "AmpFileError",
    "AmpGradientWarning",
    "AmpIndexError",
    "AmpRuntimeWarning",
    "AmpStateError",
    "AmpTypeError",
    "AmpValueError",
    "AmpWarning",
    "Engine",
    "Policy",
    "amp",
]
__all__ += amp.__all__
