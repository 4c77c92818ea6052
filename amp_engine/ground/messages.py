"""Messages go to the logger `amp_engine`, and from there to stdout as plain lines unless the application changes that.

An application configures the logger before amp_engine is imported or later; docs/receipt.md says how.
"""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("amp_engine")

# A configuration that names neither logger disables both (`disable_existing_loggers`); a configuration that disables
# LOGGER on purpose disables only LOGGER.
_WITNESS = logging.getLogger("amp_engine.by_default")


class StdoutHandler(logging.Handler):
    """Writes each message as one line to the current `sys.stdout`.

    Like `print` it does not flush, so that other code's lines keep their place between ours, and does nothing if there
    is no stdout. If writing fails, logging reports that on stderr, and the training goes on.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        stream = sys.stdout
        if stream is None:
            return
        try:
            stream.write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)


def say(text: str, level: int = logging.INFO, stacklevel: int = 1, **fields: object) -> None:
    """Log one message; a text of several lines is one message, too.

    Args:
        text: the message; nothing in it is formatted.
        level: INFO for events of every run, WARNING for events that a user should look at.
        stacklevel: the stack frame whose file and line the record has: 1 is the caller's.
        fields: more attributes of the record: plain values, so that any formatter can write them.
    """
    if LOGGER.disabled and _WITNESS.disabled:
        LOGGER.disabled = _WITNESS.disabled = False
    LOGGER.log(level, text, extra=fields, stacklevel=stacklevel + 1)


def users_stacklevel() -> int:
    """Return the `stacklevel` for a `warnings.warn` of the caller at which the warning names the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "amp_engine.")):
        frame, level = frame.f_back, level + 1
    return level


def _set_defaults(logger: logging.Logger) -> None:
    """Set a level if there is none, and if there is no handler add ours and stop propagation."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(StdoutHandler())
        logger.propagate = False


_set_defaults(LOGGER)
