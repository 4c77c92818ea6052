"""The host's time in a step on tensors of the GPU, and its calls of CUDA; on the default stream and on another one.

Times are those of `tests/benchmarks/host.py`. Calls are counted in a step whose gradients are handed over, so that all
of them are the engine's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import torch

from amp_engine import kernels
from tests.benchmarks.host import medians
from tests.gpu.stand_in import calls_of
from tests.gpu_run.program import Task, task
from tests.gpu_run.steps import Shape, ours
from tests.gpu_run.timing import counts

MOST = 12  # names of calls in a row
HALF = {"O2": torch.float16, "O5": torch.bfloat16}


class Host:
    """Levels, numbers of tensors and streams."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def list(self) -> Iterator[tuple[str, float, Callable[[], None]]]:
        """Names, seconds that they need, and functions."""
        tiny = self._task.tiny
        for count in (3,) if tiny else (300, 10_000):
            for side in (False, True):
                for level in ("O2",) if tiny else ("O5", "O2", "O1"):
                    name = f"{level}, {count:,} tensors, {'a side stream' if side else 'the default stream'}"
                    yield name, count / 700, partial(self.measure, name, level, count, side)

    def measure(self, name: str, level: str, count: int, side: bool) -> None:
        """Write the times and the calls of one case."""
        cuda, device = self._task.cuda, self._task.device
        with cuda.stream(cuda.Stream() if side else cuda.current_stream()):
            times = medians(level, count, 2 if self._task.tiny else 22, device)
            with ExitStack() as stack:
                shape = Shape(count, 64, device)
                step = ours(stack, shape, level, shape.random(HALF.get(level, torch.float32)))
                for _ in range(3):
                    step()
                calls = calls_of(step, device)
        by_name = ", ".join(f"{call} {n}" for call, n in Counter(calls).most_common(MOST))
        self._task.rows.add(name, "ours", **times, **counts(calls), by_name=by_name)


def main() -> None:
    """Measure as much as there is time for."""
    asked = task("tests.gpu_run.host", __doc__)
    asked.rows.add("kernels", "compiled" if kernels.has_native(asked.device) else "none: plain PyTorch")
    asked.run(Host(asked).list())


if __name__ == "__main__":
    main()
