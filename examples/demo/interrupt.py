"""Ctrl-C: the first ends the training and keeps its results, the second ends the program."""

import os
import signal
import sys
from types import FrameType
from typing import Any


class Interrupt:
    """A context that notes the first SIGINT and leaves the next to the system, which ends the program at once."""

    STATUS = 130  # a shell's exit status of a program that SIGINT ended
    WORD = "interrupted"

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.came = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        said = "\nInterrupted: the table, results.json and curves.png follow.  Ctrl-C again ends at once.\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, said.encode())  # it may interrupt a print()
