"""`amp.scalars()` for TensorBoard and Weights & Biases. Imports neither: any object with their methods works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from amp_engine import amp
from amp_engine.engine import Engine
from amp_engine.tools.telemetry.scalars import scalars


class ScalarWriter(Protocol):
    """Writes numbers as a torch.utils.tensorboard.SummaryWriter does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Write one number."""


class Run(Protocol):
    """Logs numbers as a wandb.Run does."""

    def log(self, data: dict[str, float], *, step: int) -> object:
        """Write some numbers."""


class TensorBoardScalars:
    """Writes `amp.scalars()` with `writer.add_scalar(name, value, step)`.

        log = TensorBoardScalars(SummaryWriter("runs"))
        for step, (x, y) in enumerate(batches):
            ...
            optimizer.step()
            log(step)

    Args:
        writer: a SummaryWriter.
        engine: the engine whose scalars are written; None: that of `amp`.

    No host sync. Raises AmpStateError when `amp.scalars` does.
    """

    def __init__(self, writer: ScalarWriter, engine: Engine | None = None) -> None:
        self._writer = writer
        self._engine = engine

    def __call__(self, step: int) -> None:
        """Write the present numbers."""
        for name, value in _scalars(self._engine).items():
            self._writer.add_scalar(name, value, step)


class WandbScalars:
    """Writes `amp.scalars()` with `run.log(scalars, step=step)`, as `TensorBoardScalars` does.

    Args:
        run: the return value of `wandb.init()`.
        engine: the engine whose scalars are written; None: that of `amp`.
    """

    def __init__(self, run: Run, engine: Engine | None = None) -> None:
        self._run = run
        self._engine = engine

    def __call__(self, step: int) -> None:
        """Write the present numbers, in one call."""
        found = _scalars(self._engine)
        if found:
            self._run.log(dict(found), step=step)


def _scalars(engine: Engine | None) -> Mapping[str, float]:
    return amp.scalars() if engine is None else scalars(engine)
