"""Where messages go: the logger `amp_engine`, and from there to stdout as plain lines unless the application says else.

An application decides by the logger of that name, before amp_engine is imported or later; docs/explaining.md says how.
"""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("amp_engine")

# A configuration that names neither disables both (`disable_existing_loggers`); who means this logger disables one.
_WITNESS = logging.getLogger("amp_engine.by_default")


# An attribute of records: StdoutHandler writes an empty line before such a one.
APART = "amp_apart"


class StdoutHandler(logging.Handler):
    """Writes each message as one line to what `sys.stdout` is at that moment.

    As `print` does: it flushes nothing, so that lines of others keep their place between ours, and is silent where
    there is no stdout. What cannot be written is reported by logging on stderr, and the training goes on.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, after an empty one where it is to be set apart."""
        stream = sys.stdout
        if stream is None:
            return
        try:
            before = "\n" if getattr(record, APART, False) else ""
            stream.write(f"{before}{self.format(record)}\n")
        except Exception:
            self.handleError(record)


def say(text: str, level: int = logging.INFO, stacklevel: int = 1, **fields: object) -> None:
    """Log one message; a text of several lines is one message, too.

    Args:
        text: as it is; nothing in it is formatted.
        level: INFO is what a run goes through anyway, WARNING what somebody should look at.
        stacklevel: whose file and line the record has: 1 is the caller's.
        fields: more attributes of the record. Plain values, so that any formatter can write them.
    """
    if LOGGER.disabled and _WITNESS.disabled:
        LOGGER.disabled = _WITNESS.disabled = False
    LOGGER.log(level, text, extra=fields, stacklevel=stacklevel + 1)


def _set_defaults(logger: logging.Logger) -> None:
    """A level where none is set, and where there is no handler the one above and no other."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(StdoutHandler())
        logger.propagate = False


_set_defaults(LOGGER)
