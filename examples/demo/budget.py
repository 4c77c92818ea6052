"""Divides the demo's time among its rows, by measured times."""

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from examples.demo.tasks import HALF_LEVELS, Layer, Task
from examples.demo.training import now

SECONDS = 150.0  # for all rows together, of the three minutes that the demo takes at most
FEWEST_STEPS = 5  # a row that would have fewer is left out
LONG_ENOUGH = 0.04  # seconds; a time that is longer is exact enough
SLOW = 1.5  # a type that takes more than so many times FP32's time is the reason of short rows

MeasureFn = Callable[[Layer, torch.dtype, torch.device], float]


def type_of(opt_level: str) -> torch.dtype:
    """The type that a level computes in."""
    if opt_level == "O0":
        return torch.float32
    return torch.float16 if opt_level in HALF_LEVELS else torch.bfloat16


def measure(layer: Layer, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of a forward and backward of the layer in `dtype`, extrapolated from a part of the batch if slow."""
    module = layer.build().to(device, dtype)
    rows = 1
    seconds = _seconds_of(module, layer, rows, dtype, device)  # a warmup, discarded
    while True:
        seconds = _seconds_of(module, layer, rows, dtype, device)
        if seconds > LONG_ENOUGH or rows == layer.rows:
            break
        rows = min(4 * rows, layer.rows)
    if seconds < 2 * LONG_ENOUGH:
        seconds = min(seconds, _seconds_of(module, layer, rows, dtype, device))
    return seconds * layer.rows / rows


def _seconds_of(module: nn.Module, layer: Layer, rows: int, dtype: torch.dtype, device: torch.device) -> float:
    inputs = torch.ones(rows, *layer.row_shape, device=device, dtype=dtype, requires_grad=True)
    started = now(device)
    module(inputs).sum().backward()
    return now(device) - started


class Budget:
    """Divides the seconds among the rows: each gets the time that it needs, or an equal share if that is less.

    The time that a row needs is predicted from its layer in its type, and from steps of its task in other rows.

    Args:
        tasks: all tasks, in their order.
        device: where they are trained.
        seconds: for everything, from now on.
        clock: returns seconds.
        measure: returns the seconds that a layer takes in a type.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        device: torch.device,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.perf_counter,
        measure: MeasureFn = measure,
    ) -> None:
        self.clock = clock
        self._ends = clock() + seconds
        self._device = device
        self._measure = measure
        self._waiting = [(task, opt_level) for task in tasks for opt_level in task.levels]
        self._layers: dict[tuple[str, torch.dtype], float] = {}  # seconds, by task and type
        self._steps: dict[tuple[str, torch.dtype], float] = {}

    def measure_layers(self, goes_on: Callable[[], bool]) -> None:
        """Measure the layer of every task in each of its types, about a second in all."""
        for task, opt_level in self._waiting:
            key = task.name, type_of(opt_level)
            if key not in self._layers and goes_on():
                self._layers[key] = self._measure(task.layer, key[1], self._device)

    def step_seconds(self, task: Task, opt_level: str) -> float:
        """Seconds of a step of the row: as seen in the same type, or else predicted."""
        dtype = type_of(opt_level)
        if (task.name, dtype) in self._steps:
            return self._steps[task.name, dtype]
        fp32 = self._layers[task.name, torch.float32]
        base = self._steps.get((task.name, torch.float32), task.layer.per_step * fp32)
        return base + task.layer.per_step * max(0.0, self._layers[task.name, dtype] - fp32)

    def take(self, task: Task, opt_level: str) -> float | None:
        """Seconds that the row may take, None if it is left out; removes the row from the waiting rows."""
        row = task, opt_level
        share = self._shares(row)
        self._waiting.remove(row)
        return share

    def seen(self, task: Task, opt_level: str, seconds: float) -> None:
        """Record the mean seconds of a step of the row."""
        self._steps[task.name, type_of(opt_level)] = seconds

    def needed(self) -> float:
        """Predicted seconds of all waiting rows."""
        if not self._waiting:
            return 0.0
        costs = self._fitting({row: self._cost(*row) for row in self._waiting})
        return min(sum(costs.values()), self._left())

    def why(self, task: Task, opt_level: str) -> str:
        """The reason that a row is short, in plain words."""
        dtype = type_of(opt_level)
        ratio = self._layers[task.name, dtype] / self._layers[task.name, torch.float32]
        name = str(dtype).removeprefix("torch.")
        where = "GPU" if self._device.type == "cuda" else "CPU"
        step = f"a step takes about {self.step_seconds(task, opt_level):.2g} s"
        if ratio > SLOW:
            return f"{name} {task.layer.name} take {ratio:.2g} times FP32's time on this {where}; {step}"
        return f"{step} on this {where}"

    def _shares(self, row: tuple[Task, str]) -> float | None:
        costs = {other: self._cost(*other) for other in self._waiting}
        costs[row] = float("inf")  # it may take all that others leave, if it is slower than predicted
        fitting = self._fitting(costs)
        return even_share(fitting.values(), self._left()) if row in fitting else None

    def _fitting(self, costs: dict[tuple[Task, str], float]) -> dict[tuple[Task, str], float]:
        """The rows that have time for `FEWEST_STEPS` once the slowest other rows are left out."""
        costs = dict(costs)
        while costs:
            share = even_share(costs.values(), self._left())
            slow = {row: self.step_seconds(*row) for row in costs if share < min(costs[row], self._fewest(*row))}
            if not slow:
                break
            del costs[max(slow, key=lambda row: slow[row])]
        return costs

    def _cost(self, task: Task, opt_level: str) -> float:
        return (task.steps + task.evaluation_steps) * self.step_seconds(task, opt_level)

    def _fewest(self, task: Task, opt_level: str) -> float:
        return min(FEWEST_STEPS, task.steps) * self.step_seconds(task, opt_level)

    def _left(self) -> float:
        return max(0.0, self._ends - self.clock())


def even_share(costs: Iterable[float], seconds: float) -> float:
    """The most that each may take so that all together take `seconds`; the others get the rest of shares not needed."""
    share, waiting = 0.0, sorted(costs)
    while waiting:
        share = seconds / len(waiting)
        if waiting[0] > share:
            break
        seconds -= waiting.pop(0)
    return share if waiting else float("inf")
