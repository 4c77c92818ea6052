"""`python -m amp_engine`: `info` says what is installed; `advise` and `audit` look at a training script."""

import argparse
import json
import os
import sys

from amp_engine import __version__

_FIRST_STEP = """\
a first step, for a script with or without amp, and for one that imports apex:
  python -m amp_engine advise train.py
  python -m amp_engine.apex --check train.py
"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command of `python -m amp_engine`. Returns an exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["advise"]:  # the arguments after it include those of the script
        from amp_engine.tools.advice import command

        return command.main(arguments[1:])
    if arguments[:1] == ["audit"]:
        from amp_engine.tools.advice import audit_command

        return audit_command.main(arguments[1:])
    parser = _parser()
    if arguments[:1] == ["apex"]:
        parser.error("apex is typed with a dot: python -m amp_engine.apex train.py")
    options = parser.parse_args(arguments)
    if options.command != "info":
        parser.print_help()
        return 0
    from amp_engine.tools.software import describe

    if options.json:
        print(json.dumps(dict(describe()), indent=2))
    else:
        for name, state in describe():
            print(f"{name:<12}{state}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amp_engine",
        description="Mixed precision training for PyTorch.",
        epilog=_FIRST_STEP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"amp_engine {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands")
    says = "what is installed, what was compiled, and why something is missing"
    info = commands.add_parser("info", help=says, description=f"Say {says}.")
    info.add_argument("--json", action="store_true", help="as one JSON object")
    commands.add_parser("advise", help="a few steps of a training script at each level, and which one to take")
    commands.add_parser("audit", help="a few steps of any training script, and what rounding erases of them")
    commands.add_parser("apex", help="run a script for apex unmodified: python -m amp_engine.apex train.py")
    return parser


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        status = 1
    sys.exit(status)
