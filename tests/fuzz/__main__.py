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

from tests.fuzz.actions import ACTIONS
from tests.fuzz.sequences import Sequence, draw, run, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--sequences", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next one has the next number")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--level", help="this one only")
    parser.add_argument("--without", default="", help="actions to leave out: " + ", ".join(ACTIONS))
    parser.add_argument("--failures", type=int, default=1, help="how many to go on after")
    parser.add_argument("--replay", type=Path, help="run the lines of this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.replay:
        failure = run(Sequence.parse(options.replay.read_text()))
        print(failure or "no mismatch")
        return int(failure is not None)

    begin, count, failures = time.monotonic(), 0, 0
    seen: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.sequences):
        if time.monotonic() - begin > 60 * options.minutes:
            break
        sequence = draw(seed, options.without.split(","), options.level)
        count += 1
        seen.update(name for name, _, _ in sequence.actions)
        if run(sequence) is not None:
            failures += 1
            sequence = shrink(sequence)
            print(f"--- seed {seed}: {run(sequence)}{sequence}", flush=True)
            if failures == options.failures:
                break
    print(f"{count} sequences, {sum(seen.values())} actions of {len(seen)} kinds, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
