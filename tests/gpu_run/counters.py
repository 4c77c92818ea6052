"""The traffic of the kernels by the hardware's counters: bytes of DRAM a parameter, sectors a request.

Without arguments it runs itself under `ncu`, which is no failure where it is absent or refused. Only what lies between
cudaProfilerStart and Stop is measured. Clocks are left alone.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.gpu_run.report import Rows

NUMEL, COUNT = 64_000_000, 16
KINDS = ("adam float16", "adam float32", "lamb float16")  # in the order in which they run
SHORTEST = 20_000  # ns; what is shorter moves no parameters
BASIC = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
}
MORE = {
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "load sectors",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": "load requests",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "store sectors",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": "store requests",
    "lts__t_sectors_op_read.sum": "L2 read sectors",
    "lts__t_sectors_op_write.sum": "L2 write sectors",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %",
}


def profiled(device_name: str, tiny: bool) -> None:
    """Check and update of FP32 masters with float16 gradients, once each between the marks of the profiler."""
    import torch

    from tests.gpu.stand_in import cuda_of
    from tests.gpu_run.steps import Kernels, Shape

    device = torch.device(device_name)
    cuda = cuda_of(device)
    count, numel = (2, 1_000) if tiny else (COUNT, NUMEL // COUNT)
    shape = Shape(count, numel, device)
    for name in KINDS:
        kind, dtype = name.split(" ")
        bare = Kernels(shape, kind, getattr(torch, dtype))
        bare.step()
        cuda.synchronize()
        cuda.cudart().cudaProfilerStart()
        bare.check()
        bare.step()
        cuda.synchronize()
        cuda.cudart().cudaProfilerStop()
    print("profiled", flush=True)


def parsed(text: str) -> list[tuple[str, dict[str, float]]]:
    """The kernels in ncu's CSV and their metrics. It has two layouts: a line for a kernel, or for a metric."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    kernels: dict[str, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(lines):
        if not row.get("ID"):
            continue  # the units
        metrics = kernels.setdefault(row["ID"], (row.get("Kernel Name") or "", {}))[1]
        pairs = [(row["Metric Name"], row.get("Metric Value"))] if row.get("Metric Name") else list(row.items())
        for name, value in pairs:
            if name in BASIC or name in MORE:
                number = _number(value)
                if number is not None:
                    metrics[name] = number
    return list(kernels.values())


def short(kernel: str) -> str:
    """A kernel's name without namespaces and arguments."""
    for part in ("(anonymous namespace)::", "<unnamed>::", "amp_engine::", "cuda::", "void "):
        kernel = kernel.replace(part, "")
    return kernel.split("(")[0][:60]


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def numbers(metrics: dict[str, float], parameters: int) -> Iterator[tuple[str, float]]:
    """A kernel's row: bytes a parameter, sectors a request."""
    named = {short: metrics[name] for name, short in {**BASIC, **MORE}.items() if name in metrics}
    if "ns" in named:
        yield "us", named["ns"] / 1e3
    for what in ("read", "written"):
        if what in named:
            yield f"DRAM {what}, B/parameter", named[what] / parameters
    for what in ("load", "store"):
        if named.get(f"{what} requests"):
            yield f"sectors a {what}", named[f"{what} sectors"] / named[f"{what} requests"]
    for what in ("read", "write"):
        if f"L2 {what} sectors" in named:
            yield f"L2 {what}, B/parameter", named[f"L2 {what} sectors"] * 32 / parameters
    for what in ("DRAM %", "warps %"):
        if what in named:
            yield what, named[what]


def measure(
    metrics: dict[str, str], output: Path, seconds: float, arguments: Sequence[str] = ()
) -> tuple[list[tuple[str, dict[str, float]]], str]:
    """Run under ncu, with further arguments. What it measured, and what it said."""
    output.unlink(missing_ok=True)
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--target-processes", "all", "--metrics", ",".join(metrics)]
    command += ["--log-file", str(output), sys.executable, "-m", "tests.gpu_run.counters", "--profiled", *arguments]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
        )
        said = done.stdout
    except subprocess.TimeoutExpired as error:
        cut = error.output.decode(errors="replace") if isinstance(error.output, bytes) else error.output or ""
        said = f"no answer within {seconds:.0f} s\n{cut}"
    text = output.read_text(errors="replace") if output.exists() else ""
    print(said[-3000:])
    print(text[-12000:])
    notes = [line for line in (said + text).splitlines() if line.startswith("==ERROR") or "no answer" in line]
    return parsed(text), " ".join(notes)[:300] or "no kernel was measured"


def main() -> None:
    """Measure with all metrics, or, where one of them is unknown, with the basic ones."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_run.counters", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profiled", action="store_true", help="run what is profiled, and no profiler")
    args = parser.parse_args()
    if args.profiled:
        return profiled(args.device, args.tiny)
    rows = Rows(args.rows, "counters")
    if not shutil.which("ncu"):
        return rows.add("counters", "ncu is not installed")
    end = time.monotonic() + float(os.environ.get("GPU_RUN_SECONDS", "600")) - 4.0
    Path("build").mkdir(exist_ok=True)
    arguments = ["--device", args.device, *["--tiny"] * args.tiny]
    for metrics in ({**BASIC, **MORE}, BASIC):
        found, why = measure(metrics, Path("build/ncu.csv"), max(1.0, end - time.monotonic()), arguments)
        if found:
            break
        rows.add("counters", "refused", why=why)
    for i, (kernel, values) in enumerate(found):
        if values.get("gpu__time_duration.sum", SHORTEST) >= SHORTEST:
            rows.add(f"64M parameters, {', '.join(KINDS)}", f"{i}: {short(kernel)}", **dict(numbers(values, NUMEL)))
    print(f"{len(found)} kernels measured")
    return None


if __name__ == "__main__":
    main()
