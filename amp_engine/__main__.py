"""`python -m amp_engine info`: what is installed, what was compiled, and why something is missing."""

import argparse

from amp_engine.telemetry.software import describe


def main(arguments: list[str] | None = None) -> None:
    """Run a command of `python -m amp_engine`."""
    parser = argparse.ArgumentParser(prog="python -m amp_engine", description="What this amp_engine is made of.")
    commands = parser.add_subparsers(dest="command", title="commands")
    commands.add_parser("info", help="what is installed, what was compiled, and why something is missing")
    if parser.parse_args(arguments).command == "info":
        for name, state in describe():
            print(f"{name:<12}{state}")
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
