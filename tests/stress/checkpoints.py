"""Runs that are killed at any moment, and files that are damaged anywhere: `make stress`.

`make test` does not run this file. tests/behaviour/test_checkpoint_files.py kills before each operation of a save, and
damages fixed places.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from amp_engine import AmpFileError, amp
from tests.interrupted import FORMS, Nursery, adamw, damaged
from tests.models import NORMED_MLP
from tests.support import left_alone, scaler_numbers, started, train

KILLS = int(os.environ.get("KILLS", "200"))  # in all forms; half of them while a checkpoint is written
DAMAGES = int(os.environ.get("DAMAGES", "200"))
SEED = int(os.environ.get("SEED", "0"))
LAST = 12
WHILE_RUNNING, WHILE_SAVING = 0.12, 0.02  # seconds; a run of 12 steps takes longer, a save less


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_is_killed_at_random_resumes_bitwise(nursery: Nursery, tmp_path: Path, form: str) -> None:
    chance, kills_each = random.Random(SEED), max(2, KILLS // len(FORMS))
    truth = nursery.run(tmp_path / "truth.pt", LAST, form=form).digests
    path = tmp_path / "run" / "checkpoint.pt"
    path.parent.mkdir()
    known = 0  # the step of the file
    kills = {"saving": 0, "elsewhere": 0}
    for _ in range(100 * kills_each):
        if min(kills.values()) >= kills_each // 2:
            break
        saving = kills["saving"] < kills_each // 2
        longest = WHILE_SAVING if saving else WHILE_RUNNING
        outcome = nursery.run(path, LAST, kill_after=longest * chance.random(), saving=saving, form=form)
        assert outcome.digests.items() <= truth.items()
        known = max(known, outcome.saved)
        possible = {known, known + 1} if outcome.in_save else {known}
        if outcome.killed:
            kills["saving" if outcome.in_save else "elsewhere"] += 1
            resumed = nursery.run(path, known + 1, form=form)
            assert not resumed.killed
            assert min(resumed.digests) in possible
            assert resumed.digests.items() <= truth.items()
            assert os.listdir(path.parent) == [path.name] or min(resumed.digests) > known, "nothing is left of a save"
            known += 1
        if known >= LAST - 1:
            path.unlink()
            known = 0
    print(f"\n{kills['saving']} kills while saving, {kills['elsewhere']} elsewhere, each resumed bit for bit")
    assert min(kills.values()) >= kills_each // 2


def test_damage_anywhere_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    path = tmp_path / "checkpoint.pt"
    model, optimizer = started("O2", adamw)
    train(NORMED_MLP, model, optimizer, "co")
    amp.save(path, model=model, optimizer=optimizer, step=2)
    train(NORMED_MLP, model, optimizer, "c", first=2)
    data, numbers = path.read_bytes(), scaler_numbers()
    with left_alone(model, optimizer):
        for _ in range(DAMAGES):
            what, changed = damaged(data, chance)
            path.write_bytes(changed)
            with pytest.raises(AmpFileError, match=r"checkpoint\.pt is damaged.* expected .*found "):
                pytest.fail(f"loaded with {what}: {amp.load(path, model=model, optimizer=optimizer)}")
        assert scaler_numbers() == numbers
