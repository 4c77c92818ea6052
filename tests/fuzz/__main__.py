"""Run random sequences: `python -m tests.fuzz --sequences 20000 --seed 0 --minutes 60`.

A failing sequence is shortened and printed, one action a line; `--replay FILE` runs such lines.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from tests.fuzz.sequences import Sequence, draw, run, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--sequences", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next one has the next number")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--level", help="this one only")
    parser.add_argument("--replay", type=Path, help="run the lines of this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.replay:
        failure = run(Sequence.parse(options.replay.read_text()))
        print(failure or "no mismatch")
        return int(failure is not None)

    begin, count, failed = time.monotonic(), 0, False
    seen: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.sequences):
        if time.monotonic() - begin > 60 * options.minutes:
            break
        sequence = draw(seed, options.level)
        count += 1
        seen.update(name for name, _, _ in sequence.actions)
        if run(sequence) is not None:
            failed = True
            sequence = shrink(sequence)
            print(f"--- seed {seed}: {run(sequence)}{sequence}", flush=True)
            break
    print(f"{count} sequences, {sum(seen.values())} actions of {len(seen)} kinds, {int(failed)} failures")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
