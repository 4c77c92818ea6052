"""`python -m amp_engine audit`: the command line."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from amp_engine.errors import AmpError
from amp_engine.ground.messages import wrapped
from amp_engine.tools.advice.command import check_json, parser_of, split, write_json
from amp_engine.tools.advice.running import check_script, child_command, child_environment

NAME = "python -m amp_engine audit"
VARIABLE = "AMP_ENGINE_AUDIT"
_FAILED = "The script failed before the first step of a torch.optim.Optimizer, with exit status {status}."
_NO_STEP = (
    "The script ended without a step of a torch.optim.Optimizer in the process that was started.  Trainings in "
    "processes of their own (torchrun, mp.spawn) are not followed: run the script on one GPU."
)


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Returns the exit status of the script; 2 for an invalid command line, 1 if no optimizer of the script stepped, or if
    the file of `--json` could not be written after the audit was printed.
    """
    parser = _parser()
    own, target = split(parser, list(arguments))
    options = parser.parse_args(own)
    for name in ("steps", "every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    check_json(parser, options.json, "audit.json")
    try:
        check_script(target)
    except AmpError as e:
        print(wrapped(f"{NAME}: {e}", sys.stderr), file=sys.stderr)
        return 2 if isinstance(e, ValueError) else 1
    with tempfile.TemporaryDirectory(prefix="amp_audit_") as folder:
        told = {"steps": options.steps, "every": options.every, "folder": folder}
        status = _wait(subprocess.Popen(child_command(target), env=child_environment(VARIABLE, told)))
        text, json = Path(folder, "audit.txt"), Path(folder, "audit.json")
        if not text.exists():
            why = _FAILED.format(status=status) if status else _NO_STEP
            print(wrapped(f"{NAME}: {why}", sys.stderr), file=sys.stderr)
            return status or 1
        print(text.read_text(encoding="utf-8"), end="", flush=True)
        is_written = write_json(NAME, options.json, json.read_text(encoding="utf-8"))
    return status if is_written else status or 1


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the exit status, in the convention of shells."""
    while True:
        try:
            status = process.wait()
            return status if status >= 0 else 128 - status
        except KeyboardInterrupt:  # the script gets it too, and ends
            continue


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        NAME,
        "Run an unmodified training script, with or without amp, and say which share of each tensor's "
        "steps rounding erases, the worst first, and what to do. The script is ended after its steps. Its `import "
        "apex` finds amp_engine unless NVIDIA's apex with amp is installed.",
    )
    parser.add_argument("--steps", type=int, default=20, help="of the first optimizer that steps (default 20)")
    parser.add_argument("--every", type=int, default=1, help="audit each how-manieth step (default 1)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all records to a file")
    return parser
