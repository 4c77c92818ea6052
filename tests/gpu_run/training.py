"""Training steps end to end: ours at each level against FP32, TF32 and autocast, samples a second and memory.

Each contestant trains a model of its own from the same seed with clipping, ours with `torch.optim.AdamW`, the others
with `AdamW(fused=True)`, at float16 with GradScaler. Times are between events behind each step, without waits in
between; the median counts. Compiled: the model's equal blocks, `Module.compile` each (on the CPU by Dynamo alone). As a
graph: the whole iteration is captured and replayed. DDP has its buckets as gradients, and FSDP2 its blocks as units,
both with one rank.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from amp_engine import Engine, amp
from tests.gpu.stand_in import captured, cuda_of
from tests.gpu_run.models import Example, examples
from tests.gpu_run.program import Task, task

WARMUP = 3
SECONDS, FEWEST, MOST = 1.0, 5, 40  # of the steps that are timed

Step = Callable[[], Tensor]

FLOAT32, TF32, PURE = "FP32", "TF32", "pure bfloat16"
AUTOCAST = {"autocast bfloat16": torch.bfloat16, "autocast float16": torch.float16}
SEVEN_BYTES = {"master_weights": "24bit", "moment_dtype": "8bit"}
IN_LESS_MEMORY = {
    "O5, 7 bytes": SEVEN_BYTES,
    "O5, 7 bytes, released": {**SEVEN_BYTES, "release_gradients": True},
    "O5, masters on the CPU": {"masters_on": "cpu"},
}
AGAINST = {
    **dict.fromkeys(("O4", "O5", *IN_LESS_MEMORY), "autocast bfloat16"),
    **dict.fromkeys(("O1", "O2", "O3"), "autocast float16"),
    "O0": FLOAT32,
}
LEVELS = tuple(AGAINST)
PEERS = ("autocast bfloat16", "O5", "O4", "autocast float16", "O2")  # first of what is compared, most valuable
OTHERS = (*IN_LESS_MEMORY, "O1", PURE, TF32, FLOAT32, "O3", "O0")
COMPILED, GRAPH, DDP, FSDP2 = "compiled", "as a graph", "DDP", "FSDP2"  # how a model is trained; "" otherwise
NEEDS = {COMPILED: 12.0, GRAPH: 6.0}  # seconds


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


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process alone, which outlives the models that use it."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def blocks_of(example: Example, model: nn.Module) -> list[nn.Module]:
    """The model's equal parts."""
    assert example.block
    return [module for module in model.modules() if isinstance(module, example.block)]


def shard(example: Example, model: nn.Module, policy: MixedPrecisionPolicy, root: MixedPrecisionPolicy) -> None:
    """Make each block, and the model, a unit of FSDP2."""
    for block in blocks_of(example, model):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=root)


def wrapped(example: Example, model: nn.Module, how: str) -> nn.Module:
    """The model, compiled or for DDP if so asked."""
    if how == COMPILED:
        for block in blocks_of(example, model):
            block.compile(backend="inductor" if next(block.parameters()).is_cuda else "eager")
    return DistributedDataParallel(model, gradient_as_bucket_view=True) if how == DDP else model


def replayed(step: Step, device: torch.device) -> Step:
    """The step, captured after it has run on a stream of its own."""
    cuda, losses = cuda_of(device), [torch.zeros(())]

    def body() -> None:
        losses[0] = step()

    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(WARMUP):
            body()
    cuda.current_stream().wait_stream(stream)
    replay = captured(body, device)

    def again() -> Tensor:
        replay()
        return losses[0]

    return again


@contextmanager
def ours(example: Example, who: str, device: torch.device, how: str = "") -> Iterator[Step]:
    """A step at a level."""
    level, _, words = who.partition(", ")
    options: dict[str, Any] = IN_LESS_MEMORY[who] if words else {}
    model, inputs, targets = build(example, device)
    if how == FSDP2:
        shard(example, model, amp.fsdp_policy(level), amp.fsdp_policy(level, root=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=example.lr, eps=1e-4 if level == "O3" else 1e-8)
    with Engine() as engine:
        engine.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        model = wrapped(example, model, how)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            with engine.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            if example.clips and "release_gradients" not in options:
                engine.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            return loss.detach()

        yield replayed(step, device) if how == GRAPH else step


@contextmanager
def peer(example: Example, who: str, device: torch.device, how: str = "") -> Iterator[Step]:
    """A step of torch.amp, under FSDP2 of its MixedPrecisionPolicy; in FP32; in bfloat16 alone."""
    model, inputs, targets = build(example, device)
    dtype = AUTOCAST.get(who)
    if who == PURE:
        model.bfloat16()
    if how == FSDP2:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        shard(example, model, policy, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=example.lr, fused=True, capturable=how == GRAPH)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    model = wrapped(example, model, how)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype) if dtype and how != FSDP2 else nullcontext():
            loss = loss_of(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if example.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    yield replayed(step, device) if how == GRAPH else step


def contestant(example: Example, who: str, device: torch.device, how: str = "") -> AbstractContextManager[Step]:
    """Ours at the level `who`, or what it is compared with."""
    if who in LEVELS:
        return ours(example, who, device, how)
    return peer(example, who, device, how)


@contextmanager
def tf32(allowed: bool | None) -> Iterator[None]:
    """Allow TF32 for FP32 products, or not; None: torch's defaults, which allow it for convolutions alone."""
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
        every = list(examples(self._task.tiny))
        transformer = every[0]
        for package in ("transformers", "timm"):
            if not find_spec(package):
                self._task.rows.add("not installed", package, without="BERT" if package == "transformers" else "ResNet")
        # Tiny: each model, each contestant and each way to train, but few of them together.
        peers = PEERS[1:2] if self._task.tiny else PEERS
        cases = [(example, who, "") for example in every for who in (PEERS if example is transformer else peers)]
        cases += [(example, who, GRAPH) for example in every for who in peers]
        cases += [(transformer, who, COMPILED) for who in peers]
        cases += [(transformer, who, "") for who in OTHERS]
        cases += [(transformer, who, how) for how in (DDP, FSDP2) for who in peers[:2]]
        for example, who, how in cases:
            needs = 0.0 if self._task.tiny else NEEDS.get(how, 4.0)
            yield f"{case_of(example, how)}, {who}", needs, partial(self.measure, example, who, how)

    def measure(self, example: Example, who: str, how: str) -> None:
        """Train, and write a row."""
        self._task.cuda.reset_peak_memory_stats()
        with one_rank(self._task.device) if how in (DDP, FSDP2) else nullcontext():
            ms, numbers = self._trained(example, who, how)
        case = case_of(example, how)
        median = self._medians[case, who] = statistics.median(ms)
        against = self._medians.get((case, AGAINST.get(who, "")))
        self._task.rows.add(
            case,
            who,
            per_s=example.count / median * 1e3,
            unit=f"{example.unit}/s",
            ms=median,
            p10=sorted(ms)[len(ms) // 10],
            p90=sorted(ms)[len(ms) * 9 // 10],
            ratio=median / against if against else None,
            peak_gb=self._task.cuda.max_memory_allocated() / 1e9,
            steps=len(ms),
            **numbers,
        )
        if how == COMPILED:
            torch.compiler.reset()

    def _trained(self, example: Example, who: str, how: str) -> tuple[list[float], dict[str, float]]:
        """Milliseconds of the steps, and more numbers for the row; the model is let go of."""
        allowed = {TF32: True, FLOAT32: False, "O0": False}.get(who)
        start = time.monotonic()
        with tf32(allowed), contestant(example, who, self._task.device, how) as step:
            losses = [step().clone() for _ in range(WARMUP)]
            losses[-1].item()
            prepared = time.monotonic() - start
            ms, last = timed(step, self._task.device, 2 if self._task.tiny else None)
            return ms, {"first_loss": losses[0].item(), "last_loss": last.item(), "prepared_s": prepared}


def case_of(example: Example, how: str) -> str:
    """Return the name of a row."""
    return f"{example.name}, {how}" if how else example.name


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
