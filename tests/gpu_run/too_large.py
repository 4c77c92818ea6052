"""A GPT whose state in FP32, 16 bytes a parameter, is a third larger than a GPU of 16 GiB: who trains it?

A larger GPU is given 16 GiB for it. With masters on the CPU the host's memory takes 16 bytes a parameter, 23 GB. Times
are those of five steps on one batch behind the first; peaks those of all.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.gpu_run.models import gpt, gpt_124m
from tests.gpu_run.program import Task, task
from tests.gpu_run.training import IN_LESS_MEMORY, Step, contestant

CARD = 1 << 34  # bytes
WIDTH, STEPS = 2048, 5
WHO = (*reversed(IN_LESS_MEMORY), "O5", "autocast bfloat16")


class TooLarge:
    """The contestants, on one model."""

    def __init__(self, task: Task) -> None:
        self._task, total = task, task.cuda.mem_get_info()[1]
        card = min(CARD, total)
        self._share, layers = card / total, int(card / 12 / (12 * WIDTH**2))
        name = f"GPT, {layers} layers of {WIDTH}, 2 x 1024 tokens, in {card / 1e9:.1f} GB"
        self._example = gpt_124m(2, tiny=True) if task.tiny else gpt(name, 8192, WIDTH, layers, 2, 1024, heads=16)

    def list(self) -> Iterator[tuple[str, float, Callable[[], None]]]:
        """Names, seconds that they need, and functions."""
        for who in WHO:
            yield who, 0.0 if self._task.tiny else 10.0, partial(self.measure, who)

    def measure(self, who: str) -> None:
        """Train, and write a row; that there is not enough memory is a result."""
        cuda, numbers = self._task.cuda, dict[str, object](trains="out of memory")
        cuda.reset_peak_memory_stats()
        cuda.set_per_process_memory_fraction(self._share)
        try:
            with contestant(self._example, who, self._task.device) as step:
                try:
                    numbers |= self._trained(step)
                finally:
                    numbers["peak_gb"] = cuda.max_memory_allocated() / 1e9
                    cuda.set_per_process_memory_fraction(1.0)  # the end gives the model back in FP32
        except RuntimeError as error:  # torch.OutOfMemoryError, but from an extension
            if "out of memory" not in str(error):
                raise
        self._task.rows.add(self._example.name, who, **numbers)

    def _trained(self, step: Step) -> dict[str, object]:
        first, ms = step().item(), []
        for _ in range(STEPS):
            start = time.perf_counter()
            last = step().item()
            ms.append((time.perf_counter() - start) * 1e3)
        host_gb = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e9
        losses = {"first_loss": first, "last_loss": last}
        return {"trains": "yes", "ms": statistics.median(ms), **losses, "host_gb": host_gb}


def main() -> None:
    """Train all."""
    asked = task("tests.gpu_run.too_large", __doc__)
    asked.run(TooLarge(asked).list())


if __name__ == "__main__":
    main()
