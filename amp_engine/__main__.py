"""`python -m amp_engine`: `info` says what is installed; `advise` and `audit` look at a training script."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run a command of `python -m amp_engine`. Returns an exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m amp_engine", description="What this amp_engine is made of.")
    commands = parser.add_subparsers(dest="command", title="commands")
    commands.add_parser("info", help="what is installed, what was compiled, and why something is missing")
    commands.add_parser("advise", help="a few steps of a training script at each level, and which one to take")
    commands.add_parser("audit", help="a few steps of any training script, and what rounding erases of them")
    if arguments[:1] == ["advise"]:  # the arguments after it include those of the script
        from amp_engine.tools.advice import command

        return command.main(arguments[1:])
    if arguments[:1] == ["audit"]:
        from amp_engine.tools.advice import audit_command

        return audit_command.main(arguments[1:])
    if parser.parse_args(arguments).command == "info":
        from amp_engine.tools.software import describe

        for name, state in describe():
            print(f"{name:<12}{state}")
    else:
        parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
