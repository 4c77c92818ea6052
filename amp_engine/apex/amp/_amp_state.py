"""`apex.amp._amp_state`, the module: the state object of the same name, and messages that follow its settings."""

from amp_engine.amp import _amp_state as _amp_state
from amp_engine.amp import master_params as master_params
from amp_engine.apex_private.state import AmpState as AmpState
from amp_engine.errors import AmpStateError
from amp_engine.levels.report import complain


def warn_or_err(msg: str) -> None:
    """Raise AmpStateError with `msg`, or print it as a warning if `_amp_state.hard_override` is set."""
    if not _amp_state.hard_override:
        raise AmpStateError(msg)
    complain(msg)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print `msg` unless `_amp_state.verbosity` is 0; with `rank0` only on rank 0."""
    _amp_state.engine.reporter.say(msg, rank0)
