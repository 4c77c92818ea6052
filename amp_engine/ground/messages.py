"""Messages go to the logger `amp_engine`, and from there to stdout as plain lines unless the application changes that.

An application configures the logger before amp_engine is imported or later; docs/receipt.md says how.
"""

from __future__ import annotations

import logging
import sys
from textwrap import wrap
from typing import Any

LOGGER = logging.getLogger("amp_engine")

# A configuration that names neither logger disables both (`disable_existing_loggers`); a configuration that disables
# LOGGER on purpose disables only LOGGER.
_WITNESS = logging.getLogger("amp_engine.by_default")


COLUMNS = 110
"""Messages that go to a terminal are wrapped to this width; in files and pipes a message stays one line."""


def wrapped(text: str, stream: Any) -> str:
    """Return `text` as it is to be written to `stream`."""
    if not getattr(stream, "isatty", bool)():
        return text
    return "\n".join(line for one in text.split("\n") for line in _lines(one))


def _lines(line: str) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    if len(line) <= COLUMNS:
        return [line]
    return wrap(line, COLUMNS, subsequent_indent=f"{indent}    ", break_long_words=False, break_on_hyphens=False)


class StdoutHandler(logging.Handler):
    """Writes each message as one line to the current `sys.stdout`; to a terminal wrapped, in lines of `COLUMNS`.

    Like `print` it does not flush, so that other code's lines keep their place between ours, and does nothing if there
    is no stdout. If writing fails, logging reports that on stderr, and the training goes on.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        stream = sys.stdout
        if stream is None:
            return
        try:
            stream.write(f"{wrapped(self.format(record), stream)}\n")
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


def _set_defaults(logger: logging.Logger) -> None:
    """Set a level if there is none, and if there is no handler add ours and stop propagation."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(StdoutHandler())
        logger.propagate = False


_set_defaults(LOGGER)
