"""Run an unmodified script whose `import apex` is answered by amp_engine.

    python -m amp_engine.apex [--replace] [--no-children] script.py [arguments]
    python -m amp_engine.apex [--replace] [--no-children] -m package.module [arguments]
    python -m amp_engine.apex [--replace] [--no-children] -c code [arguments]
    torchrun --nproc_per_node=2 -m amp_engine.apex [--local_rank] script.py [arguments]
    python -m amp_engine.apex --check [--json] path [path ...]
    python -m amp_engine.apex --fix|--undo path [path ...]

The rest is as for `python`: a script, a directory or a zip file with a __main__.py, `-m` or `-c`, then the program's
own arguments.

  --replace      also replace an installed NVIDIA apex that has amp, which is otherwise left alone
  --no-children  do not answer in the processes that the program starts
  --local_rank   append --local_rank=N to the program's own arguments, as torch.distributed.launch once did and torchrun
                 does not; N is LOCAL_RANK, or 0
  --check        run nothing; list uses of apex in these files and directories, and what to write for unserved ones;
                 with --json as one JSON object
  --fix          run nothing; add `import amp_engine.apex.install` to each file there that imports apex, show the diff
  --undo         remove these lines
  -h, --help     print this text
"""

import os
import sys
from typing import NoReturn

from amp_engine.apex import finder

_NAME = "amp_engine.apex"


def main(arguments: list[str]) -> int:
    """Run the command line. Returns an exit status, or replaces this process by the program."""
    replace = once = wants_rank = False
    while arguments:
        option = arguments[0]
        if option in ("-h", "--help"):
            print(__doc__)
            return 0
        if option in ("--check", "--fix", "--undo"):
            if len(arguments) == 1:
                return _fail(f"{option} needs files or directories: {option} path [path ...]")
            # Imported here, so that running a script does not import them.
            if option == "--check":
                from amp_engine.tools.apex_check import check

                return check.main(arguments[1:])
            from amp_engine.tools.apex_check import fix

            return fix.main(arguments[1:], undo=option == "--undo")
        if option not in ("--replace", "--no-children", "--local_rank"):
            break
        wants_rank |= option == "--local_rank"
        replace |= option == "--replace"
        once |= option == "--no-children"
        arguments = arguments[1:]
    if not arguments:
        print(f"{__doc__}\nHere {finder.decide(replace=replace)}.")
        return 0
    if complaint := _complaint(arguments):
        return _fail(complaint)
    if wants_rank:
        arguments = [*arguments, f"--local_rank={os.environ.get('LOCAL_RANK', '0')}"]
    return _run(arguments, replace=replace, once=once)


def _complaint(target: list[str]) -> str | None:
    """Return what is wrong with `target`, what is allowed, and what to type; None if python can run it."""
    first = target[0]
    if first in ("-m", "-c"):
        return None if len(target) > 1 else f"{first} needs {'a module' if first == '-m' else 'code'} after it"
    if first.startswith("-") and first != "-":
        return (
            f"no option {first}: there are --replace, --no-children, --local_rank, --check, --fix, --undo, -m and -c. "
            f"Options of python stand before `-m {_NAME}`, those of the script behind the script"
        )
    if first != "-" and not os.path.exists(first):
        module = first.removesuffix(".py").replace("/", ".")
        return f"no file {first!r} in {os.getcwd()}; a module is run by `-m {module}`"
    if sys.flags.ignore_environment or sys.flags.no_site:
        return (
            "python's -E, -I and -S keep PYTHONPATH or sitecustomize from the script, and with them this command. "
            "Leave them out, or write `import amp_engine.apex.install` at the top of the script"
        )
    return None


def _run(target: list[str], *, replace: bool, once: bool) -> NoReturn:
    # A new interpreter replaces this process. With runpy, torch would already be imported and would not see variables
    # that the script sets before its own import of torch (OMP_NUM_THREADS, TORCH_LOGS), and `__main__`, tracebacks,
    # signals and exit statuses would not be python's own.
    if target[0] not in ("-m", "-c", "-") and not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        sys.path[0] = os.path.dirname(os.path.realpath(target[0]))
    decision = finder.decide(replace=replace)
    if decision.other is not None:
        print(f"{_NAME}: {decision}.", file=sys.stderr)
    environment = dict(os.environ)
    finder.add_children(environment, replace=replace, once=once)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *_interpreter_options(), *target], environment)


def _interpreter_options() -> list[str]:
    """Return the options between `python` and `-m amp_engine.apex`: `-u`, `-W error`, `-m pdb`."""
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    last = options.pop() if options else ""
    if last == _NAME:
        last = options.pop()  # -m, -um
        cluster = last[:-1]
    else:
        cluster = last[: -len(f"m{_NAME}")] if last.endswith(f"m{_NAME}") else ""  # -mamp_engine.apex; a path
    return [*options, cluster] if cluster.strip("-") else options


def _fail(complaint: str) -> int:
    print(f"python -m {_NAME}: {complaint}.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
