"""Training steps end to end: ours at each level against FP32, TF32 and autocast, samples a second and memory.

Each contestant trains a model of its own from the same seed with clipping, ours with `torch.optim.AdamW`, the others
with `AdamW(fused=True)`, at float16 with GradScaler. Times are between events behind each step, without waits in
between; the median counts. Compiled: the model's equal blocks, `Module.compile` each (on the CPU by Dynamo alone).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine import Engine
from tests.gpu.stand_in import cuda_of
from tests.gpu_run.models import Example, examples
from tests.gpu_run.program import Task, task

LEARNING_RATE = 1e-4
WARMUP = 3
SECONDS, FEWEST, MOST = 1.5, 5, 40  # of the steps that are timed

Step = Callable[[], Tensor]

FLOAT32, TF32 = "FP32", "TF32"
AUTOCAST = {"autocast bfloat16": torch.bfloat16, "autocast float16": torch.float16}
PEERS = ("autocast bfloat16", "O5", "O4", "autocast float16", "O2", "O1")  # first of what is compared, most valuable
OTHERS = (TF32, "O3", FLOAT32, "O0")


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, in FP32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def build(example: Example, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    """Model, inputs and targets, the same for every contestant."""
    torch.manual_seed(0)
    with torch.device(device):
        model = example.model()
    inputs, targets = example.batch(device)
    if inputs.dim() == 4:
        model.to(memory_format=torch.channels_last)
    return model, inputs, targets


def compiled(example: Example, model: nn.Module) -> None:
    """Compile the model's blocks in place."""
    assert example.compiled
    for module in model.modules():
        if isinstance(module, example.compiled):
            module.compile(backend="inductor" if next(module.parameters()).is_cuda else "eager")


@contextmanager
def ours(example: Example, level: str, device: torch.device, compile_blocks: bool) -> Iterator[Step]:
    """A step at `level`."""
    model, inputs, targets = build(example, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-4 if level == "O3" else 1e-8)
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level=level, verbosity=0)
        if compile_blocks:
            compiled(example, model)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            with engine.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            engine.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            return loss.detach()

        yield step


@contextmanager
def peer(example: Example, dtype: torch.dtype | None, device: torch.device, compile_blocks: bool) -> Iterator[Step]:
    """A step of torch.amp; without a type in FP32."""
    model, inputs, targets = build(example, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    if compile_blocks:
        compiled(example, model)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype) if dtype else nullcontext():
            loss = loss_of(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    yield step


@contextmanager
def tf32(allowed: bool | None) -> Iterator[None]:
    """Whether FP32 products may be TF32; None: torch's defaults, which are TF32 for convolutions alone."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if allowed is not None:
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


class Training:
    """The contestants of each model, and what they are compared with."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._medians: dict[tuple[str, str], float] = {}

    def list(self) -> Iterator[tuple[str, float, Callable[[], None]]]:
        """Names, seconds that they need, and functions; the most valuable first."""
        gpt, resnet, lstm = examples(self._task.tiny)
        needs, needs_compiled = (0.0, 0.0) if self._task.tiny else (6.0, 15.0)
        cases = [(example, who, False) for example in (gpt, resnet, lstm) for who in PEERS]
        cases += [(gpt, who, True) for who in PEERS[:2]]
        cases += [(example, who, False) for example in (gpt, resnet, lstm) for who in OTHERS]
        cases += [(gpt, who, True) for who in PEERS[2:] if not self._task.tiny]
        for example, who, compile_blocks in cases:
            if self._task.device.type == "cpu" and example is lstm and who in AUTOCAST:
                continue  # torch has none in bfloat16 without AVX-512, and none in float16 without AVX512-FP16
            name = f"{example.name}{', compiled' * compile_blocks}, {who}"
            yield name, needs_compiled if compile_blocks else needs, partial(self.measure, example, who, compile_blocks)

    def measure(self, example: Example, who: str, compile_blocks: bool = False) -> None:
        """Train, and write a row."""
        device, cuda = self._task.device, self._task.cuda
        cuda.reset_peak_memory_stats()
        allowed = {TF32: True, FLOAT32: False, "O0": False}.get(who)
        contestant = (
            ours(example, who, device, compile_blocks)
            if who.startswith("O")
            else peer(example, AUTOCAST.get(who), device, compile_blocks)
        )
        start = time.monotonic()
        with tf32(allowed), contestant as step:
            losses = [step()]
            losses += [step() for _ in range(WARMUP - 1)]
            losses[-1].item()
            prepared = time.monotonic() - start
            ms, last = timed(step, device, 2 if self._task.tiny else None)
            first, last_loss = losses[0].item(), last.item()
        case = example.name + ", compiled" * compile_blocks
        self._medians[case, who] = statistics.median(ms)
        half = {"O4": "bfloat16", "O5": "bfloat16", "O1": "float16", "O2": "float16", "O3": "float16"}.get(who)
        against = self._medians.get((case, FLOAT32 if who == "O0" else f"autocast {half}"))
        self._task.rows.add(
            case,
            who,
            per_s=example.count / self._medians[case, who] * 1e3,
            unit=f"{example.unit}/s",
            ms=self._medians[case, who],
            p10=sorted(ms)[len(ms) // 10],
            p90=sorted(ms)[len(ms) * 9 // 10],
            ratio=self._medians[case, who] / against if against else None,
            peak_gb=cuda.max_memory_allocated() / 1e9,
            steps=len(ms),
            first_loss=first,
            last_loss=last_loss,
            prepared_s=prepared,
        )
        if compile_blocks:
            torch.compiler.reset()


def timed(step: Step, device: torch.device, count: int | None) -> tuple[list[float], Tensor]:
    """Milliseconds of each of some steps, `count` or as many as there is time for, and the loss of the last."""
    cuda = cuda_of(device)
    cuda.synchronize()
    start = time.perf_counter()
    step()
    cuda.synchronize()
    count = count or max(FEWEST, min(MOST, int(SECONDS / (time.perf_counter() - start))))
    events = [cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)], loss


def main() -> None:
    """Train as many as there is time for."""
    asked = task("tests.gpu_run.training", __doc__)
    asked.run(Training(asked).list())


if __name__ == "__main__":
    main()
