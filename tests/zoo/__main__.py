"""Hold the casts against every architecture: `make zoo`, or `make zoo ARGS="llama t5"`, or `ARGS=--resume`.

A tiny random model is built of each architecture of transformers, and of a dozen each of diffusers and timm, without a
network. Each is measured in a process of its own (process.py), for which see measure.py:

* as loaded in bfloat16, the outputs before and after `amp.initialize(opt_level="O5")`: equal bit for bit, but for the
  cast of outputs to FP32;
* built in FP32, the error of the outputs at O5 and O2 against FP32: at most twice that under torch.autocast;
* a training step at O5 and O2.

A row beyond these limits needs a reason in reasons.py; without one the exit status is 1. Rows are in
build/zoo/rows.jsonl as soon as they are measured, and --resume goes on where a run was stopped; a whole run writes
docs/zoo.md and build/zoo/results.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.zoo.process import in_processes
from tests.zoo.report import line_of, page_of
from tests.zoo.verdict import complaints


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what `arguments` ask for. Returns 1 if a row is beyond its limits without a reason."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("architectures", nargs="*", metavar="architecture", help="default: all")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the run before")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("build/zoo"), help="default: %(default)s")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="for a whole run's page; default: %(default)s")
    options = parser.parse_args(arguments)

    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "rows.jsonl"
    rows = {}
    if options.resume and path.exists():
        rows = {row["architecture"]: row for row in map(json.loads, path.read_text().splitlines())}
    names = options.architectures or all_architectures()
    with path.open("a" if options.resume else "w") as file:
        for row in in_processes([name for name in names if name not in rows], options.workers):
            rows[row["architecture"]] = row
            print(json.dumps(row), file=file, flush=True)
            print(line_of(row), flush=True)
    found = [rows[name] for name in names]
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    if not options.architectures:
        (options.docs / "zoo.md").write_text(page_of(found))
    bad = [f"{row['architecture']}: {text}" for row in found for text in complaints(row)]
    print("\n".join(["", *bad, f"{len(bad)} rows beyond their limits without a reason."]))
    return 1 if bad else 0


def all_architectures() -> list[str]:
    import tests.clients.torchvision_operators  # noqa: F401  (before what imports torchvision)
    from tests.zoo.architectures import architectures

    return architectures()


if __name__ == "__main__":
    sys.exit(main())
