"""The optimizer step on a GPU against the device's ceilings and against what people leave apex for.

`python -m tests.benchmarks.gpu --out DIR` writes gpu.md and gpu.json there. Times are between CUDA events around one
call on a drained queue: for many small tensors they contain the host's work, except in rows of a replayed graph, which
contain the upload of the tables instead. Ours and its peers take turns; ratios are medians over the rounds.

Ours is what a user calls: the exit of `scale_loss` (inf check, norm), `amp.clip_grad_norm_`, `optimizer.step()` with
the model's weights written back. The peer does the same work with FP32 parameters: autocast's casts of weights and
gradients, GradScaler's `unscale_`, torch's `clip_grad_norm_`, `AdamW(fused=True)`. The backward itself is left out of
both: gradients are handed over as it would. Without clipping and casts the peer does less than we do.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from amp_engine import Engine, kernels
from tests.benchmarks.timing import median_ratio

Run = Callable[[], object]

LEARNING_RATE = 1e-5
CHECK_BYTES, UPDATE_BYTES = 2.0, 28.0  # per parameter: docs/design/stepping.md
STEP_BYTES = CHECK_BYTES + UPDATE_BYTES
PEER_BYTES = 60.0  # casts 6 + 6, unscale_ 8, clip 4 + 8, AdamW 28

FIVE_STREAMS = """template <typename T> void f(T a, T b, T c, T d, T e, T& v, T& w, T& x, T& y, T& z) {
  v = a + b; w = b + c; x = c + d; y = d + e; z = e + a;
}"""


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        case, what: which parameters, and what was done with them.
        ms: median.
        spread: from the 10th to the 90th percentile, in ms.
        gb_per_s: by the bytes that the work must move; None where that is not the point.
    """

    case: str
    what: str
    ms: float
    spread: tuple[float, float]
    gb_per_s: float | None


class Report:
    """Rows, written to disk after each, so that a call cut short keeps what it has."""

    def __init__(self, folder: Path, rounds: int, warmup: int) -> None:
        self.rows: list[Row] = []
        self._folder, self._rounds, self._warmup = folder, rounds, warmup
        folder.mkdir(parents=True, exist_ok=True)
        self._about = about()

    def time(self, case: str, what: str, run: Run, n_bytes: float | None = None) -> None:
        """Measure `run` and append a row."""
        self.time_in_turns(case, {what: (run, n_bytes)})

    def time_in_turns(self, case: str, contestants: dict[str, tuple[Run, float | None]]) -> list[list[float]]:
        """Measure what takes turns, append a row for each; the ms of each in every round."""
        for run, _ in contestants.values():
            for _ in range(self._warmup):
                run()
        times: list[list[float]] = [[] for _ in contestants]
        for _ in range(self._rounds):
            for mine, (run, _) in zip(times, contestants.values(), strict=True):
                mine.append(elapsed_ms(run))
        for mine, (what, (_, n_bytes)) in zip(times, contestants.items(), strict=True):
            self._add(case, what, mine, n_bytes)
        return times

    def _add(self, case: str, what: str, times: list[float], n_bytes: float | None) -> None:
        ms = statistics.median(times)
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        rate = None if n_bytes is None else n_bytes / ms / 1e6
        self.rows.append(Row(case, what, ms, (deciles[0], deciles[-1]), rate))
        self._write()
        print(f"{case:32} {what:48} {ms:9.3f} ms" + ("" if rate is None else f" {rate:8.0f} GB/s"), flush=True)

    def _write(self) -> None:
        data = {**self._about, "rows": [asdict(row) for row in self.rows]}
        (self._folder / "gpu.json").write_text(json.dumps(data, indent=2) + "\n")
        ceiling = max((row.gb_per_s or 0.0 for row in self.rows if row.case == "ceiling"), default=0.0)
        lines = [f"{key}: {value}  " for key, value in self._about.items()]
        lines += ["", "| case | what | ms | 10th to 90th percentile | GB/s | of the best ceiling |", f"|{'---|' * 6}"]
        for row in self.rows:
            rate = "| |" if row.gb_per_s is None else f"{row.gb_per_s:.0f} | {row.gb_per_s / ceiling:.0%} |"
            low, high = row.spread
            lines.append(f"| {row.case} | {row.what} | {row.ms:.3f} | {low:.3f} to {high:.3f} | {rate}")
        (self._folder / "gpu.md").write_text("\n".join(lines) + "\n")


def elapsed_ms(run: Run) -> float:
    """From a drained queue on."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def about() -> dict[str, str]:
    """Date, GPU, driver, torch and commit."""

    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "commit": output("git", "describe", "--always", "--dirty"),
        "native": str(kernels.has_native(torch.device("cuda"))),
    }


@contextmanager
def emptied() -> Iterator[None]:
    """Gives the memory of what was made inside back at the end."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def ceilings(report: Report, n: int) -> None:
    """What the device does at best: `n` float32 elements per stream."""
    x, y = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    report.time("ceiling", "copy", lambda: y.copy_(x), 8.0 * n)
    report.time("ceiling", "read", lambda: x.sum(), 4.0 * n)
    try:
        function = torch.cuda.jiterator._create_multi_output_jit_fn(FIVE_STREAMS, num_outputs=5)
        streams = [torch.randn(n, device="cuda") for _ in range(5)]
        report.time("ceiling", "read 5 streams, write 5", lambda: function(*streams), 40.0 * n)
    except Exception as error:  # no runtime compiler, or whatever else it raises
        print(f"no ceiling of 5 streams: {error}")


class Tensors(nn.Module):
    """Parameters of one size, without a forward."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(numel, device="cuda").mul_(0.02) for _ in range(count))


def random_gradients(count: int, numel: int) -> list[Tensor]:
    """Random data: zeros are quicker to move and slower to take roots of."""
    return [torch.randn(numel, dtype=torch.float16, device="cuda") for _ in range(count)]


def ours(count: int, numel: int, gradients: list[Tensor]) -> Run:
    """One O2 step from the end of the backward on."""
    model = Tensors(count, numel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine = Engine()
    engine.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale="dynamic")
    params = list(model.parameters())
    loss = torch.zeros((), device="cuda")

    def step() -> None:
        with engine.scale_loss(loss, optimizer):
            for p, g in zip(params, gradients, strict=True):
                p.grad = g
        engine.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peer(count: int, numel: int, gradients: list[Tensor], *, bare: bool) -> Run:
    """GradScaler and AdamW(fused=True) on FP32 parameters; `bare` without clipping and casts."""
    params = list(Tensors(count, numel).parameters())
    optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
    scaler.scale(torch.zeros((), device="cuda"))  # makes its state; 1, for `floats` are unscaled again and again
    floats = [g.to(torch.float32) for g in gradients] if bare else []

    def step() -> None:
        if bare:
            for p, g in zip(params, floats, strict=True):
                p.grad = g
        else:
            for p in params:
                p.detach().to(torch.float16)  # autocast's cast of a weight, once an iteration
            for p, g in zip(params, gradients, strict=True):
                p.grad = g.to(torch.float32)  # and its backward
        scaler.unscale_(optimizer)
        if not bare:
            nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@dataclass
class Kernels:
    """The kernels of a step without the engine around them."""

    gradients: list[Tensor]
    table: kernels.StepTable
    scale: Tensor
    growth: Tensor
    found_inf: Tensor
    norm: Tensor
    inv_scale: Tensor
    listed: kernels.ListCheck

    @classmethod
    def of(cls, gradients: list[Tensor]) -> Kernels:
        """AdamW with FP32 masters, float16 parameters."""
        weights = [g.to(torch.float32) for g in gradients]
        copies = [torch.empty_like(g) for g in gradients]
        state = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
        steps = torch.zeros(len(weights), device="cuda")
        table = kernels.StepTable("adam", weights, copies, *state, [0] * len(weights), steps, None)
        scalars = [torch.tensor(x, device="cuda") for x in (2.0**16, 0.0, 0.0, 2.0**-16)]
        growth = torch.zeros((), dtype=torch.int32, device="cuda")
        return cls(gradients, table, scalars[0], growth, *scalars[1:], kernels.ListCheck())

    def check(self) -> None:
        """Pass 1."""
        self.listed.run(self.gradients, None, self.scale, self.found_inf, self.norm)

    def step(self) -> None:
        """Pass 2."""
        hyperparameters = kernels.FORMULAS["adam"](lr=LEARNING_RATE, weight_decay=0.01, decoupled=True)
        self.table.step(
            self.gradients,
            [True] * len(self.gradients),
            [hyperparameters],
            inv_scale=self.inv_scale,
            found_inf=self.found_inf,
            norm=self.norm,
            max_norm=1.0,
        )

    def all(self) -> None:
        """Both passes and the scale between them."""
        self.check()
        kernels.update_scale_(
            self.scale,
            self.growth,
            self.found_inf,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=2000,
            min_scale=2.0**-24,
            max_scale=2.0**24,
        )
        self.step()


def replayed(run: Run) -> Run:
    """`run` captured in a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def compare(report: Report, case: str, count: int, numel: int) -> None:
    """Kernels, our step and the peer's for one shape of the parameters."""
    total = count * numel
    gradients = random_gradients(count, numel)
    with emptied():
        bare = Kernels.of(gradients)
        report.time(case, "our kernels: check", bare.check, CHECK_BYTES * total)
        report.time(case, "our kernels: update", bare.step, UPDATE_BYTES * total)
        report.time(case, "our kernels: all, replayed graph", replayed(bare.all), STEP_BYTES * total)
        bare.found_inf.fill_(1.0)
        report.time(case, "our kernels: update, skipped", bare.step)
        del bare
    with emptied():
        contestants = {
            "ours: exit, clip, step, write back": (ours(count, numel, gradients), STEP_BYTES * total),
            "peer: casts, unscale, clip, AdamW(fused)": (peer(count, numel, gradients, bare=False), PEER_BYTES * total),
            "peer: unscale, AdamW(fused), no clip, no casts": (peer(count, numel, gradients, bare=True), None),
        }
        mine, theirs, least = report.time_in_turns(case, contestants)
        del contestants
    print(
        f"{case}: ours / peer {median_ratio(mine, theirs):.3f}, "
        f"without its clipping and casts {median_ratio(mine, least):.3f}"
    )


def main() -> None:
    """Run everything; what was measured so far is always on disk."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for gpu.md and gpu.json")
    parser.add_argument("--rounds", type=int, default=30, help="of which the median counts")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full numbers of parameters")
    args = parser.parse_args()
    report = Report(args.out, args.rounds, args.warmup)
    with emptied():
        ceilings(report, int(args.scale * 1e9))
    billion = int(args.scale * 1e9)
    compare(report, "1B in 300 tensors", 300, billion // 300)
    compare(report, "1B in one tensor", 1, billion)
    compare(report, "10,000 tensors of 1,000", int(args.scale * 10_000), 1_000)
    print(args.out / "gpu.md")


if __name__ == "__main__":
    main()
