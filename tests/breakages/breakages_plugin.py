"""Notes which tests reach which breakages; runs chosen tests in a chosen order. A pytest plugin.

It is copied into the trees that tests.breakages.breakages runs, whose sources call its `__reached__`, in child
processes too: it imports little. Each process adds what it reaches to one file, which is emptied after each test.
"""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from typing import Any

REACHED_NOW = "BREAKAGES_REACHED_NOW"  # the file of what the present test reached
RECORDS = "BREAKAGES_RECORDS"  # the folder for a line of each test: seconds, what it reached, whether it failed
TESTS = "BREAKAGES_TESTS"  # the file of the tests to run, in order
FAILED = "BREAKAGES_FAILED"  # the file of the tests that were started, and that failed

_seen: set[str] = set()


def __reached__(name: str) -> None:  # noqa: N807
    if name not in _seen:
        _seen.add(name)
        if (path := os.environ.get(REACHED_NOW)) is not None:
            _add_line(path, name)


__reached__._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it once, as it traces
builtins.__reached__ = __reached__  # type: ignore[attr-defined]


def _add_line(path: str | Path, line: str) -> None:
    with open(path, "a") as file:
        file.write(line + "\n")


def _name(test: str, root: Path) -> str:
    """The test's id in any tree: some ids have a path inside their tree."""
    return test.replace(str(root), "{tree}")


class Recorder:
    def __init__(self, root: Path, folder: Path, worker: str) -> None:
        self.root = root
        self.now, self.records = folder / f"{worker}.now", folder / f"{worker}.jsonl"
        self.seconds, self.failed, self.shares = 0.0, False, False
        os.environ[REACHED_NOW] = str(self.now)
        self.now.write_text("")

    def pytest_runtest_logstart(self) -> None:
        self._record("")  # what was reached between tests
        self.seconds, self.failed, self.shares = 0.0, False, False

    def pytest_fixture_setup(self, fixturedef: Any) -> None:
        self.shares |= fixturedef.scope == "module"

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds += report.duration
        self.failed |= report.failed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._record(_name(nodeid, self.root))

    def _record(self, test: str) -> None:
        reached = sorted(set(self.now.read_text().split()))
        self.now.write_text("")
        _seen.clear()
        if test or reached:
            record = {"test": test, "reached": reached, "seconds": round(self.seconds, 3), "failed": self.failed}
            _add_line(self.records, json.dumps({**record, "shares": self.shares}))


class Selection:
    def __init__(self, root: Path, tests: str, failed: str) -> None:
        self.root = root
        self.tests = Path(tests).read_text().splitlines()
        self.failed = failed

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        of_id = {_name(item.nodeid, self.root): item for item in items}
        selected = [of_id.pop(test) for test in self.tests if test in of_id]
        config.hook.pytest_deselected(items=list(of_id.values()))
        items[:] = selected

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _add_line(self.failed, f"started {_name(nodeid, self.root)}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            _add_line(self.failed, f"failed {_name(report.nodeid, self.root)}")


def pytest_configure(config: Any) -> None:
    is_worker = hasattr(config, "workerinput")
    is_controller = not is_worker and config.getoption("dist", "no") != "no"
    if (folder := os.environ.get(RECORDS)) is not None and not is_controller:
        worker = config.workerinput["workerid"] if is_worker else "main"
        config.pluginmanager.register(Recorder(config.rootpath, Path(folder), worker))
    if (tests := os.environ.get(TESTS)) is not None:
        config.pluginmanager.register(Selection(config.rootpath, tests, os.environ[FAILED]))
