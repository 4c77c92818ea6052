"""300 steps of a small GPT at each level and under autocast, with the same data and first weights: how losses fall."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tests.gpu_run.models import gpt
from tests.gpu_run.program import Task, task
from tests.gpu_run.training import AGAINST, LEVELS, contestant

VOCABULARY, TEXTS, LENGTH = 64, 32, 128
WIDTH, LAYERS, HEADS = 256, 4, 4
STEPS, LAST = 300, 20  # of which the mean is compared


def text(n: int, length: int) -> Tensor:
    """Text that can be learned, [n, length]: three times of four the next token is 7 times this one plus 3."""
    ids = torch.randint(VOCABULARY, (n, length))
    for i in range(1, length):
        follows = torch.rand(n) < 0.75
        ids[:, i] = torch.where(follows, (ids[:, i - 1] * 7 + 3) % VOCABULARY, ids[:, i])
    return ids


class Losses:
    """The contestants, and the losses of those they are compared with."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._steps, n, length, width, layers = (6, 2, 8, 8, 1) if task.tiny else (STEPS, TEXTS, LENGTH, WIDTH, LAYERS)
        torch.manual_seed(1)
        ids = text(self._steps * n, length + 1).unflatten(0, (self._steps, n)).to(task.device)
        self._inputs, self._targets = ids[..., :-1], ids[..., 1:]
        self._batch = self._inputs[0].clone(), self._targets[0].clone()  # what the model reads
        example = gpt("GPT", VOCABULARY, width, layers, n=n, length=length, heads=HEADS)
        self._example = replace(example, batch=lambda device: self._batch, lr=1e-3)
        self._losses: dict[str, list[float]] = {}

    def list(self) -> Iterator[tuple[str, float, Callable[[], None]]]:
        """Names, seconds that they need, and functions; first those that others are compared with."""
        for who in (*dict.fromkeys(AGAINST.values()), *LEVELS):
            yield who, 0.0 if self._task.tiny else 8.0, partial(self.measure, who)

    def measure(self, who: str) -> None:
        """Train, and write how the loss fell. FP32 is with torch's defaults."""
        losses = []
        with contestant(self._example, who, self._task.device) as step:
            for inputs, targets in zip(self._inputs, self._targets, strict=True):
                for to, given in zip(self._batch, (inputs, targets), strict=True):
                    to.copy_(given)
                losses.append(step())
            mine = self._losses[who] = torch.stack(losses).tolist()
        end, theirs = statistics.mean(mine[-LAST:]), self._losses.get(AGAINST.get(who, ""))
        thirds = {f"step_{i}": mine[i - 1] for i in (1, len(mine) // 3, 2 * len(mine) // 3, len(mine))}
        gaps = {}
        if theirs:
            gaps["gap_at_the_end"] = end - statistics.mean(theirs[-LAST:])
            gaps["largest_gap"] = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
            gaps["gap_of"] = AGAINST[who]
        self._task.rows.add(f"{len(mine)} steps", who, **thirds, mean_of_the_last=end, **gaps)


def main() -> None:
    """Train as many as there is time for."""
    asked = task("tests.gpu_run.losses", __doc__)
    asked.run(Losses(asked).list())


if __name__ == "__main__":
    main()
