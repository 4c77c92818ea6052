"""Breaks lines of amp_engine, one at a time, and says which breakages the tests notice.

    python -m tests.breakages.breakages --out build/breakages              100 lines: the tests once, then each breakage
    python -m tests.breakages.breakages --out build/breakages --list       which lines
    python -m tests.breakages.breakages --out build/breakages -- --cases pairs     arguments of pytest: a smaller suite

First all tests run once in a copy of the tree that notes which tests reach which line. Then each line is broken in
another copy, and the tests that reach it run until one fails, of each file and function one first. A crash and a hang
count as noticed. Tests that fail in the unbroken tree are left out. What is done is kept in --out, where the same
command goes on after an interruption, and where it writes report.txt.

Which lines are broken, and how, depends on the code alone: see tests/breakages/mutations.py. Some breakages change
nothing that a test could notice: those found by reading stand in tests/breakages/equivalent.txt, and are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.breakages import breakages_plugin as plugin
from tests.breakages.mutations import Breakage, choose, instrumented

HERE = Path(__file__).parent
PACKAGE = "amp_engine"
# These read sources, run all day, or test this tool.
LEFT_OUT = ["test_architecture.py", "test_benchmarks.py", "test_docs.py", "test_gpu_run.py", "test_breakages.py"]
NO_TEST_RAN = 5  # pytest's exit status
HANGS = 200  # a test that takes more seconds hangs
FIRST = 20  # as many tests run before the others that reach a breakage


@dataclass
class Record:
    """The record of one test in the unbroken tree."""

    seconds: float
    reached: set[str]
    failed: bool
    shares: bool = False  # True if it was the first with a fixture of its file, for which the others ran nothing


@dataclass
class Result:
    """The tests' answer to one breakage; `by` is empty if they said nothing."""

    name: str
    by: str
    ran: int
    reaching: int
    seconds: float


class Tree:
    """A copy of a working tree, to be changed."""

    def __init__(self, of: Path, at: Path) -> None:
        self.root = at
        shutil.rmtree(at, ignore_errors=True)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=of, check=True, capture_output=True, text=True).stdout
        compiled = [str(path.relative_to(of)) for path in (of / PACKAGE).glob("_C*")]
        for name in [*listed.split("\0"), *compiled]:
            if name and (of / name).is_file():
                (at / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(of / name, at / name)
        shutil.copy(HERE / "breakages_plugin.py", at)

    def sources(self) -> dict[str, bytes]:
        """The package's Python files."""
        paths = sorted((self.root / PACKAGE).rglob("*.py"))
        return {str(path.relative_to(self.root)): path.read_bytes() for path in paths}

    def write(self, path: str, source: bytes) -> None:
        """Replaces a source, and forgets its bytecode: Python would take it for current within the same second."""
        (self.root / path).write_bytes(source)
        for bytecode in (self.root / path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"):
            bytecode.unlink()

    def pytest(self, arguments: Iterable[str], seconds: float | None = None, **environment: str) -> int | None:
        """The exit status of pytest in this tree; None if that took too long. Its output is in pytest.log."""
        left_out = [f"--ignore=tests/{name}" for name in LEFT_OUT]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "breakages_plugin", *left_out]
        with (self.root / "pytest.log").open("w") as log:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=self.root,
                env={**os.environ, "PYTHONPATH": str(self.root), "OMP_WAIT_POLICY": "PASSIVE", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _kill_session(process)

    def run(
        self, tests: list[str], seconds: float | None, options: list[str]
    ) -> tuple[int | None, list[str], list[str]]:
        """The exit status of these tests, in this order, those that were started, and those that failed."""
        asked, said = self.root / "asked.txt", self.root / "said.txt"
        asked.write_text("\n".join(tests))
        said.write_text("")
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        options = [option for option in options if not (self.root / option.partition("::")[0]).exists()]
        status = self.pytest([*files, *options], seconds, **{plugin.TESTS: str(asked), plugin.FAILED: str(said)})
        lines = [line.partition(" ") for line in said.read_text().splitlines()]
        started = [test for word, _, test in lines if word == "started"]
        failed = [test for word, _, test in lines if word == "failed"]
        return status, started, failed


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Session:
    """The work in a folder: what is done, and what is to be done."""

    def __init__(
        self, of: Path, out: Path, breakages: list[Breakage], arguments: list[str], workers: int, at_most: int
    ) -> None:
        self.of, self.out, self.breakages = of, out, breakages
        self.arguments, self.workers, self.at_most = arguments, workers, at_most
        self.results_file = out / "results.jsonl"

    def tests(self) -> dict[str, Record]:
        """Return all tests, after one run of them in a tree that notes what they reach, or after an earlier one."""
        records = self.out / "reached"
        done = records / "done"
        if not done.exists():
            shutil.rmtree(records, ignore_errors=True)
            records.mkdir(parents=True)
            self._note_reached(records)
            done.write_text(" ".join(breakage.name for breakage in self.breakages))
        if missing := {breakage.name for breakage in self.breakages} - set(done.read_text().split()):
            sys.exit(f"{self.out} is of other breakages ({len(missing)} are new): give another --out")
        tests = read_records(records.glob("*.jsonl"))
        left_out = (records / "left_out.txt").read_text().splitlines()
        for name, test in tests.items():
            test.failed = name in left_out
        return tests

    def _note_reached(self, records: Path) -> None:
        tree = Tree(self.of, self.out / "tree-0")
        # Tests that copy the package to elsewhere have no plugin to import there.
        code = (tree.root / "breakages_plugin.py").read_text()
        first = f'if not hasattr(__import__("builtins"), "__reached__"): exec({code!r}, {{}})'
        for path, source in tree.sources().items():
            if inside := [breakage for breakage in self.breakages if breakage.path == path]:
                tree.write(path, instrumented(source, inside, first))
        side_by_side = ["-n", str(self.workers), "--dist", "loadfile", "--no-loadscope-reorder"]
        status = tree.pytest([*side_by_side, *self.arguments], **{plugin.RECORDS: str(records)})
        if status not in (0, 1):
            sys.exit(f"the tests did not run: {tree.root / 'pytest.log'}")
        left_out: set[str] = set()
        if failed := [name for name, test in read_records(records.glob("*.jsonl")).items() if test.failed]:
            # The notes make some fail, which are of use all the same; others fail in any case.
            _, started, still = Tree(self.of, self.out / "tree-0").run(failed, None, self.arguments)
            left_out = {*still, *failed} - (set(started) - set(still))
            print(f"{len(failed)} tests failed while noting, {len(left_out)} without it: these are left out")
        (records / "left_out.txt").write_text("\n".join(sorted(left_out)))

    def results(self) -> dict[str, Result]:
        """Return the results so far."""
        if not self.results_file.exists():
            return {}
        lines = self.results_file.read_text().splitlines()
        return {result.name: result for result in (Result(**json.loads(line)) for line in lines)}

    def run(self, tests: dict[str, Record]) -> None:
        """Breaks what is not done yet, in as many trees as there are workers."""
        done = self.results()
        trees: SimpleQueue[Tree] = SimpleQueue()
        for index in range(self.workers):
            trees.put(Tree(self.of, self.out / f"tree-{index}"))
        to_do = [breakage for breakage in self.breakages if breakage.name not in done]

        def one(breakage: Breakage) -> None:
            tree = trees.get()
            try:
                result = self._broken(tree, breakage, tests)
            finally:
                trees.put(tree)
            with self.results_file.open("a") as file:
                file.write(json.dumps(vars(result)) + "\n")
            print(line_of(breakage, result), flush=True)

        with ThreadPoolExecutor(self.workers) as threads:
            for _ in threads.map(one, to_do):
                pass

    def _broken(self, tree: Tree, breakage: Breakage, tests: dict[str, Record]) -> Result:
        reaching = in_order(tests, breakage.name)
        source = (tree.root / breakage.path).read_bytes()
        start = time.monotonic()
        ran, by = 0, ""
        tree.write(breakage.path, breakage.applied(source))
        try:
            for part in (reaching[:FIRST], reaching[FIRST : self.at_most]):
                if part and not by:
                    seconds = [tests[test].seconds for test in part]
                    hang = max(HANGS, 10 * max(seconds))  # much more than by itself: the machine may be busy
                    options = ["-x", "-o", f"faulthandler_timeout={hang}", *self.arguments]
                    status, started, failed = tree.run(part, 300 + hang + 20 * sum(seconds), options)
                    ran += len(started)
                    by = noticed(status, started, failed)
        finally:
            tree.write(breakage.path, source)
        return Result(breakage.name, by, ran, len(reaching), round(time.monotonic() - start, 1))


def noticed(status: int | None, started: list[str], failed: list[str]) -> str:
    """The test that noticed, or how the breakage showed otherwise; empty if all passed."""
    if failed:
        return failed[0]
    if status in (0, NO_TEST_RAN):
        return ""
    last = started[-1] if started else "the import"
    return f"{last} ({'did not end' if status is None else f'pytest ended with {status}'})"


def read_records(files: Iterable[Path]) -> dict[str, Record]:
    """Return what each test reached. Code reached while nothing was tested is under the name ''."""
    tests: dict[str, Record] = {}
    for file in files:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            test = tests.setdefault(record["test"], Record(0.0, set(), False))
            test.seconds += record["seconds"]
            test.reached |= set(record["reached"])
            test.failed |= record["failed"]
            test.shares |= record["shares"]
    return tests


def in_order(tests: dict[str, Record], name: str) -> list[str]:
    """The tests that reach a breakage, the most telling first: of each file, then of each function, the fastest."""
    at_import = "" in tests and name in tests[""].reached  # or else between tests: any of them may notice
    reaching = [test for test, told in tests.items() if test and not told.failed]
    files = {test.partition("::")[0] for test, told in tests.items() if told.shares and name in told.reached}
    reaching = [t for t in reaching if at_import or name in tests[t].reached or t.partition("::")[0] in files]
    reaching.sort(key=lambda test: tests[test].seconds)
    of_file: dict[str, int] = {}
    of_function: dict[str, int] = {}
    place: dict[str, tuple[int, int]] = {}
    for test in reaching:
        file, function = test.partition("::")[0], test.partition("[")[0]
        variant = of_function[function] = of_function.get(function, -1) + 1
        turn = of_file[file] = of_file.get(file, -1) + (variant == 0)
        place[test] = (variant, turn)
    return sorted(reaching, key=place.__getitem__)


def line_of(breakage: Breakage, result: Result | None) -> str:
    """Return one line of the report."""
    before, after = (_short(text) for text in (breakage.before, breakage.after))
    what = f"{breakage.name} {breakage.path}:{breakage.line} {breakage.operator}: {before} -> {after}"
    if result is None:
        return f"{what}\n    not done"
    if not result.reaching:
        return f"{what}\n    NOT NOTICED: no test reaches it"
    how_many = f"{result.ran} of {result.reaching} tests, {result.seconds:.0f} s"
    return f"{what}\n    {f'noticed by {result.by}' if result.by else 'NOT NOTICED'} ({how_many})"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) < 90 else text[:60] + " ... " + text[-25:]


def report(breakages: list[Breakage], results: dict[str, Result], equivalent: dict[str, str]) -> str:
    """The table as text: first how many of each room were noticed, then each breakage."""
    rooms: dict[str, list[int]] = {}
    for breakage in breakages:
        if breakage.name in results and breakage.name not in equivalent:
            for room in (breakage.room, "all"):
                counts = rooms.setdefault(room, [0, 0])
                counts[0] += bool(results[breakage.name].by)
                counts[1] += 1
    lines = [f"{room:12} noticed {noted:3} of {count:3}" for room, (noted, count) in sorted(rooms.items())]
    lines += [f"{'equivalent':12} {len([b for b in breakages if b.name in equivalent])} not counted", ""]
    for breakage in breakages:
        reason = f"\n    EQUIVALENT: {equivalent[breakage.name]}" if breakage.name in equivalent else ""
        lines.append(line_of(breakage, results.get(breakage.name)) + reason)
    return "\n".join(lines) + "\n"


def read_equivalent(file: Path) -> dict[str, str]:
    """The reason of each breakage that no test could notice: lines of a name and a reason."""
    parts = [line.partition(" ") for line in file.read_text().splitlines() if line.strip()]
    return {name: reason for name, _, reason in parts}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.breakages.breakages", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report, and of what is done")
    parser.add_argument("--tree", type=Path, default=HERE.parent.parent, help="the working tree that is tested")
    parser.add_argument("--count", type=int, default=100, help="how many lines are broken")
    parser.add_argument("--seed", type=int, default=0, help="another seed breaks other lines")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of these the ones with such names")
    parser.add_argument("--workers", type=int, default=2, help="how many processes test side by side")
    parser.add_argument("--at-most", type=int, default=2000, metavar="TESTS", help="for each breakage (default 2000)")
    parser.add_argument("--list", action="store_true", help="say what would be broken, and stop")
    parser.add_argument("--report", action="store_true", help="write the report of what is done, and stop")
    parser.add_argument("arguments", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    paths = sorted((options.tree / PACKAGE).rglob("*.py"))
    sources = {str(path.relative_to(options.tree)): path.read_bytes() for path in paths}
    breakages = choose(sources, options.count, options.seed)
    out = options.out.resolve()
    session = Session(options.tree.resolve(), out, breakages, options.arguments, options.workers, options.at_most)
    if not (options.list or options.report):
        tests = session.tests()
        session.breakages = [b for b in breakages if not options.only or b.name in options.only]
        session.run(tests)
    text = report(breakages, session.results(), read_equivalent(HERE / "equivalent.txt"))
    if not options.list:
        session.out.mkdir(parents=True, exist_ok=True)
        (session.out / "report.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
