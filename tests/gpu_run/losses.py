"""400 steps of GPT on the sources of the installed torch: how losses fall in FP32, and in less and less memory.

All contestants start from the same weights and see the same batches; none clips, since released gradients cannot. A
token is a word or a sign; the most frequent have a number of their own. The picture is drawn anew after each.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tests.gpu_run.models import TINY, VOCABULARY, gpt_124m
from tests.gpu_run.program import Task, task
from tests.gpu_run.training import FLOAT32, IN_LESS_MEMORY, PURE, contestant

TEXTS, STEPS, AVERAGED = 8, 400, 25  # texts in a batch; steps whose losses a row has the mean of
LEARNING_RATE = 3e-4
IN_7_BYTES, RELEASED, _ = IN_LESS_MEMORY
# FP32 needs more time than the four before it.
WHO = ("O5", PURE, IN_7_BYTES, RELEASED, FLOAT32, "O2", "O4")
SLOWER_IN_FLOAT32 = 7.0


def tokens(count: int, vocabulary: int) -> Tensor:
    """Return so many tokens of torch's sources, in an order of files that is always the same; 0 is any rare one."""
    files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    random.Random(0).shuffle(files)
    words: list[str] = []
    for file in files:
        words += re.findall(r"\w+|\s+|[^\w\s]", file.read_text(errors="replace"))
        if len(words) >= count:
            break
    numbers = {word: i for i, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    return torch.tensor([numbers.get(word, 0) for word in words[:count]])


class Losses:
    """The contestants and their losses."""

    def __init__(self, task: Task) -> None:
        self._task = task
        example, self._steps = gpt_124m(TEXTS, task.tiny), 6 if task.tiny else STEPS
        (n, length), vocabulary = example.batch(torch.device("cpu"))[0].shape, TINY if task.tiny else VOCABULARY
        text = tokens(self._steps * n * (length + 1), vocabulary).unflatten(0, (-1, length + 1))
        order = torch.randperm(len(text), generator=torch.Generator().manual_seed(0))
        text = text[order].unflatten(0, (self._steps, n)).to(task.device)
        self._inputs, self._targets = text[..., :-1], text[..., 1:]
        self._batch = self._inputs[0].clone(), self._targets[0].clone()  # what the model reads
        self._example = replace(example, batch=lambda device: self._batch, lr=LEARNING_RATE, clips=False)
        self._losses: dict[str, list[float]] = {}
        self._seconds = 0.0 if task.tiny else 10.0  # of a contestant

    def list(self) -> Iterator[tuple[str, float, Callable[[], None]]]:
        """Names, seconds that they need, and functions."""
        for who in WHO:
            yield who, self._seconds * (SLOWER_IN_FLOAT32 if who == FLOAT32 else 1.0), partial(self.measure, who)

    def measure(self, who: str) -> None:
        """Train, and write how the loss fell. FP32 is with torch's defaults."""
        start, losses = time.monotonic(), list[float]()
        every = 2 if self._task.tiny else AVERAGED
        with contestant(self._example, who, self._task.device) as step:
            recent = []
            for i, texts in enumerate(zip(self._inputs, self._targets, strict=True), 1):
                for to, given in zip(self._batch, texts, strict=True):
                    to.copy_(given)
                recent.append(step())
                if i % every == 0:
                    losses += torch.stack(recent).tolist()
                    recent.clear()
                    self._task.rows.add(self._example.name, who, step=i, loss=statistics.mean(losses[-every:]))
        self._losses[who] = losses
        if not self._task.tiny and who != FLOAT32:
            self._seconds = max(self._seconds, time.monotonic() - start)
        if float32 := self._losses.get(FLOAT32):
            for one in self._losses if who == FLOAT32 else (who,):
                loss, theirs = (statistics.mean(of[-AVERAGED:]) for of in (self._losses[one], float32))
                self._task.rows.add(f"{self._steps} steps", one, loss=loss, gap_to_FP32=loss - theirs)
        self._draw()

    def _draw(self) -> None:
        """Draw means of successive losses beside the rows."""
        path = self._task.rows.path
        if path is None:
            return
        try:
            from matplotlib.figure import Figure
        except ImportError:
            self._task.rows.add("not installed", "matplotlib", without="the picture")
            return
        axes = (figure := Figure(figsize=(8, 4), dpi=120, layout="constrained")).add_subplot()
        width = min(AVERAGED, self._steps)
        for who, losses in self._losses.items():
            means = torch.tensor(losses).unfold(0, width, 1).mean(1).tolist()
            axes.plot(range(width, len(losses) + 1), means, label=who, linewidth=1)
        axes.set(xlabel="step", ylabel=f"loss, mean of {width} steps", title=self._example.name)
        axes.legend(frameon=False)
        figure.savefig(path.with_suffix(".png"))


def main() -> None:
    """Train as many as there is time for."""
    asked = task("tests.gpu_run.losses", __doc__)
    asked.run(Losses(asked).list())


if __name__ == "__main__":
    main()
