"""One run of one task at one level, in the four documented calls, and what it cost."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

import torch

from amp_engine import amp
from examples.demo.tasks import OPTIONS, Task, mean_cross_entropy

FINAL_STEPS = 20  # the final loss is the mean of this many last steps


@dataclass(frozen=True)
class Row:
    """One line of the table; the field names are the keys of results.json."""

    task: str
    opt_level: str
    loss: float | None  # training loss, mean of the last FINAL_STEPS steps
    metric: float | None  # on held-out data: accuracy 0..1, or bits per character; of a whole row
    ms_per_step: float | None  # median
    speedup: float | None  # ms_per_step of O0 / ms_per_step of this level
    state_bytes: int | None  # at the end, see `state_bytes`
    skipped: int | None  # steps skipped for an overflow
    loss_scale: float | None  # at the end
    steps: int  # that were run: 0 for a row that was left out, whose values above are None
    planned_steps: int
    note: str | None  # the reason for fewer steps than planned


@dataclass(frozen=True)
class Run:
    """A row, the task it belongs to, and the training loss of every step."""

    task: Task
    row: Row
    losses: list[float]


def left_out(task: Task, opt_level: str, why: str) -> Run:
    """A row without a step."""
    nothing = (None,) * 7
    return Run(task, Row(task.name, opt_level, *nothing, steps=0, planned_steps=task.steps, note=why), [])


def train(
    task: Task,
    opt_level: str,
    device: torch.device,
    baseline: Row | None = None,
    shorten: Callable[[], str | None] = lambda: None,
) -> Run:
    """Train from the task's own seed.

    Args:
        task: what to train.
        opt_level: "O0" to "O5", or a key of `OPTIONS`.
        device: where; on CUDA every step is timed with the device's queue empty.
        baseline: the row that `speedup` is relative to; if None, `speedup` is 1; if it has no steps, None.
        shorten: called after every step but the last, outside of the timing; returns a reason to stop, or None.
    """
    torch.manual_seed(task.seed)
    model = task.build_model().to(device)
    # eps: torch's default of 1e-8 is 0 in float16, and Adam at O3 would divide by it
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, betas=(0.9, 0.99), eps=1e-5)
    options = OPTIONS.get(opt_level, {"opt_level": opt_level})
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(task.steps))

    engine = amp.current_engine()
    assert engine is not None

    losses, milliseconds, skipped, why = [], [], 0, None
    try:
        for step in range(task.steps):
            inputs, targets = (tensor.to(device) for tensor in task.batch(step))
            started = now(device)
            optimizer.zero_grad()
            loss = mean_cross_entropy(model(inputs), targets)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            milliseconds.append(1e3 * (now(device) - started))

            scheduler.step()
            losses.append(loss.item())
            skipped += engine.step_was_skipped(optimizer)
            why = shorten() if len(losses) < task.steps else None
            if why is not None:
                break
        model.eval()
        ms_per_step = median(milliseconds)
        baseline_ms = baseline.ms_per_step if baseline else ms_per_step
        row = Row(
            task=task.name,
            opt_level=opt_level,
            loss=mean(losses[-FINAL_STEPS:]),
            metric=task.evaluate(model) if why is None else None,
            ms_per_step=ms_per_step,
            speedup=baseline_ms / ms_per_step if baseline_ms else None,
            state_bytes=state_bytes(),
            skipped=skipped,
            loss_scale=amp.state_dict()["loss_scaler0"]["loss_scale"],
            steps=len(losses),
            planned_steps=task.steps,
            note=why,
        )
    finally:
        amp.close()
    return Run(task, row, losses)


def warmup_then_cosine(steps: int) -> Callable[[int], float]:
    """Factor of the learning rate: rises over the first tenth of the steps, then falls to 0."""
    warmup = max(1, steps // 10)
    return lambda step: min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


def state_bytes() -> int:
    """Bytes of parameters, buffers, masters and optimizer state, as the receipt has them."""
    return sum(one.bytes for one in amp.receipt().memory if one.kind not in ("gradients", "weight copies"))


def now(device: torch.device) -> float:
    """The time in seconds, after everything queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
