"""The benchmarks compare the same work; nothing here looks at a clock."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager

import pytest
import torch

from tests.benchmarks import dispatch, host, train
from tests.benchmarks.processes import ContestantError, interleaved, race
from tests.benchmarks.timing import Judged, Record, judged, write

STEP_KEYS = ["case", "ours_us", "peer", "peer_us", "ratio", "bytes_per_param", "bandwidth_fraction"]


def result(case: dispatch.Against, side: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Return the result of the call that one side times."""
    call: list[str] = []
    monkeypatch.setattr(dispatch, "_block", lambda source: call.append(source))
    with dispatch.sides(case)[side]():
        return eval(call[0], dispatch.operands())


@pytest.mark.parametrize("case", dispatch.AGAINST, ids=lambda case: case.name)
def test_the_peer_of_a_call_gives_the_same_type_and_needs_the_same_gradient(case, monkeypatch):
    mine, theirs = (result(case, side, monkeypatch) for side in range(2))
    assert (mine.dtype, mine.requires_grad) == (theirs.dtype, theirs.requires_grad)
    torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("case", dispatch.ADDED, ids=lambda case: case.name)
def test_the_bare_call_gives_what_the_cast_call_gives(case, monkeypatch):
    same = dispatch.Against(case.name, case.call, 1.0, case.bare)
    mine, bare = (result(same, side, monkeypatch) for side in range(2))
    assert (mine.dtype, mine.requires_grad) == (bare.dtype, bare.requires_grad)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_both_sides_of_a_training_step_start_from_the_same_model_and_train_it(level):
    dtype = torch.float16 if level in ("O1", "O2") else torch.bfloat16
    case = train.Case("tiny", 1, 8, 4, dtype, {level: 1.0}, 1)
    for contestant in (train.ours(case, level), train.peer(case)):
        with contestant as step:  # raises where no weight moves
            step()


def test_a_ratio_is_the_lower_quartile_and_the_median_stands_beside_it():
    record = judged("a case", [1.0, 2.0, 3.0, 4.0, 5.0], "a peer", [1.0] * 5, limit=2.0)
    assert (record.ratio, record.median_ratio, record.ours_us) == (2.0, 3.0, 3e6)
    assert " ok " in str(record)
    assert " over " in str(judged("a case", [3.0], "a peer", [1.0], limit=2.0))


def test_added_costs_are_compared_without_what_both_sides_share():
    record = judged("a case", [2.0], "a peer", [5.0], limit=0.35, base=[1.0])
    assert (record.ratio, record.peer_us) == (0.25, 4e6)
    assert judged("a case", [2.0], "a peer", [1.0], limit=0.35, base=[1.0]).ratio == math.inf


def test_files_hold_the_agreed_fields(tmp_path):
    record = Record("a case", 1.0, "a peer", 2.0, 0.5)
    for one, keys in ((record, STEP_KEYS), (judged("", [1.0], "", [1.0], None), [*STEP_KEYS, "median_ratio", "limit"])):
        write([one], tmp_path / "file.json")
        read = json.loads((tmp_path / "file.json").read_text())
        assert list(read["records"][0]) == keys
        assert list(read["machine"]) == ["cpu", "instructions", "cores", "torch", "date"]
    assert issubclass(Judged, Record)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_host_is_timed_in_iterations_that_step(level):
    plain, runs = torch.mm, host.iterations(level, 3)
    assert [len(next(runs)) for _ in range(3)] == [4] * 3
    runs.close()
    assert torch.mm is plain


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork beside the threads of other tests
def test_a_race_runs_every_contestant_in_every_round_and_leaves_this_process_alone():
    def counting(step):
        @contextmanager
        def contestant():
            total = iter(range(0, 100, step))
            yield lambda: float(next(total))

        return contestant

    assert race([counting(1), counting(10)], rounds=3, warmup=1) == [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_contestants_that_take_turns_in_one_process_never_meet_the_others_context():
    inside = []

    def counting(step):
        total = iter(range(0, 100, step))

        @contextmanager
        def contestant():
            inside.append(step)
            yield lambda: float(next(total)) if inside == [step] else float("nan")
            inside.remove(step)

        return contestant

    assert interleaved([counting(1), counting(10)], rounds=3, warmup=1) == [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]
    assert inside == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("runs", [race, interleaved])
def test_a_contestant_that_fails_says_why(runs):
    @contextmanager
    def failing():
        raise ValueError("no such engine")
        yield

    with pytest.raises(ContestantError, match="ValueError: no such engine"):
        runs([failing], rounds=1)
