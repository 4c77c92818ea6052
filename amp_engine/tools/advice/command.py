"""`python -m amp_engine advise`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from amp_engine.errors import AmpError
from amp_engine.ground.messages import wrapped
from amp_engine.levels.levels import LEVELS
from amp_engine.tools.advice.running import advise

NAME = "python -m amp_engine advise"


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Returns the exit status: 2 for an invalid command line, 1 if the script failed, or if the file of `--json` could not
    be written after the advice was printed.
    """
    parser = _parser()
    own, target = split(parser, list(arguments))
    options = parser.parse_args(own)
    if not target:
        parser.error("there is no script: type a script or `-m package.module`, and its arguments")
    check_json(parser, options.json, "advice.json")
    try:
        advice = advise(
            target,
            steps=options.steps,
            warmup=options.warmup,
            levels=[level for level in options.levels.split(",") if level],
            seconds=options.seconds,
            seed=options.seed,
            say=lambda line: print(f"amp_engine advise: {line}", file=sys.stderr, flush=True),
        )
    except AmpError as e:
        print(wrapped(f"{NAME}: {e}", sys.stderr), file=sys.stderr)
        return 2 if isinstance(e, ValueError) else 1
    print(advice, flush=True)
    return 0 if write_json(NAME, options.json, f"{advice.to_json()}\n") else 1


def check_json(parser: argparse.ArgumentParser, path: Path | None, example: str) -> None:
    """End the command with an error if `path` is a directory, or its directory does not exist."""
    if path is not None and path.is_dir():
        parser.error(f"--json {path} is a directory: type the path of a file, for example {example} in it")
    if path is not None and not path.parent.is_dir():
        parser.error(f"--json {path}: there is no directory {path.parent}")


def write_json(command: str, path: Path | None, text: str) -> bool:
    """Write a file, if there is a path. Returns False, and prints why, if it cannot be written."""
    try:
        if path is not None:
            path.write_text(text, encoding="utf-8")
    except OSError as e:
        print(f"{command}: --json {path} could not be written: {e.strerror or e}.", file=sys.stderr)
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        NAME,
        "Run a few steps of an unmodified training script at each level; compare losses, speed and memory, "
        "and say which level to take. The script runs once for each level and twice at O0, and is ended after its "
        "steps. Files that it writes until then are written each time. A script without amp is tried where it has one "
        "model and one optimizer.",
    )
    parser.add_argument("--steps", type=int, default=20, help="of the first optimizer, at each level (default 20)")
    parser.add_argument("--warmup", type=int, default=5, help="steps that times leave out (default 5)")
    parser.add_argument("--levels", default=",".join(LEVELS), help=f"default {','.join(LEVELS)}; O0 is always run")
    parser.add_argument("--seconds", type=float, default=120.0, help="at most, for each level (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="of random, numpy and torch (default 0)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all records to a file")
    return parser


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command that runs a script."""
    return argparse.ArgumentParser(
        prog=command,
        usage=f"{command} [options] script.py [arguments of the script]\n"
        f"       {command} [options] -m package.module [arguments of the module]",
        description=description,
        allow_abbrev=False,
    )


def split(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into our options, which come first, and the script with its own arguments."""
    end = 0
    while end < len(arguments) and arguments[end].startswith("-") and arguments[end] != "-m":
        known = parser._option_string_actions.get(arguments[end])
        end += 2 if known is not None and known.nargs is None else 1
    return arguments[:end], arguments[end:]
