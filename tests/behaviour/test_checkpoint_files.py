"""amp.save and amp.load: a file is the old one or the new one, whole; damage has a name; a refusal changes nothing."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import random
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from amp_engine import AmpFileError, AmpStateError, AmpTypeError, AmpValueError, amp
from amp_engine.saving import checkpoint_file
from tests.interrupted import Nursery, adamw, flipped
from tests.models import NORMED_MLP
from tests.support import assert_bitwise, everything, frozen, left_alone, scaler_numbers, started, train

LAST = 6
# open and lock, whatever torch writes, the archive's end, a look, to the disk, the name, the directory
STEPS_OF_A_SAVE = ["open", "flock", "write", "finish", "_check_that_it_loads", "fsync", "replace", "open", "fsync"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.pt"


# --- what is saved and loaded ---------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_run_goes_on_bitwise(path: Path, level: str) -> None:
    model, optimizer = started(level, adamw)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    train(NORMED_MLP, model, optimizer, "ccc")
    scheduler.step()
    amp.save(path, model=model, optimizer=optimizer, scheduler=scheduler, epoch=3, rng=torch.get_rng_state())
    train(NORMED_MLP, model, optimizer, "ccc", first=3)
    truth = everything(model, optimizer)
    amp.close()

    model, optimizer = started(level, adamw, seed=77)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    rest = amp.load(path, model=model, optimizer=optimizer, scheduler=scheduler)
    assert rest["epoch"] == 3
    assert sorted(rest) == ["epoch", "rng"]
    assert scheduler.last_epoch == 1
    train(NORMED_MLP, model, optimizer, "ccc", first=3)
    assert_bitwise(everything(model, optimizer), truth)


def test_torch_load_and_zip_read_the_file(path: Path) -> None:
    model, optimizer = started("O2", adamw)
    train(NORMED_MLP, model, optimizer, "c")
    amp.save(path, model=model, optimizer=optimizer, epoch=3)
    for mmap in (False, True):
        saved = torch.load(path, weights_only=True, mmap=mmap)
        assert list(saved) == ["model", "optimizer", "epoch", "amp"]
        assert_bitwise(saved["model"], dict(model.state_dict()))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        digest = archive.comment.removeprefix(b"amp_engine 1 sha256 ").decode()
    data = path.read_bytes()
    assert hashlib.sha256(data[:-64]).hexdigest() == digest
    assert data.endswith(digest.encode())


def test_several_objects_and_values_stand_under_their_names(path: Path) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = {"g": adamw(models[0].parameters()), "d": adamw(models[1].parameters())}
    amp.initialize(models, list(optimizers.values()), opt_level="O2", num_losses=2, verbosity=0)
    amp.save(path, models=models, optimizers=optimizers, lr=0.1, names=("a", "b"))
    truth = [frozen(dict(model.state_dict())) for model in models]
    with torch.no_grad():
        for model in models:
            model.weight.zero_()
    rest = amp.load(path, models=models, optimizers=optimizers)
    assert rest == {"lr": 0.1, "names": ("a", "b")}
    assert_bitwise([dict(model.state_dict()) for model in models], truth)


def test_before_initialize_the_scalers_are_not_touched_and_come_back_with_the_rest(path: Path) -> None:
    model, optimizer = started("O2", adamw)
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    amp.save(path, model=model, optimizer=optimizer)
    amp.close()
    model = NORMED_MLP.model(1)
    rest = amp.load(path, model=model)
    assert sorted(rest) == ["amp", "optimizer"]
    optimizer = adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer.load_state_dict(rest["optimizer"])
    amp.load_state_dict(rest["amp"])
    assert scaler_numbers() == (8.0, 0)
    amp.close()
    amp.save(path, model=model)
    assert list(torch.load(path, weights_only=True)) == ["model"]


# --- refusals -------------------------------------------------------------------------------------


def wrong_shape(model: nn.Module) -> dict[str, Any]:
    return {**model.state_dict(), "3.bias": torch.zeros(5)}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("what", ["model", "optimizer", "amp", "other"])
def test_what_does_not_fit_is_refused_and_everything_put_back(path: Path, level: str, what: str) -> None:
    model, optimizer = started(level, adamw, seed=5)
    train(NORMED_MLP, model, optimizer, "cc")

    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {"epoch": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state != self.state_dict():
                raise RuntimeError("of another run")

    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "other": {"epoch": 1},
        "amp": {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1, "dynamic": True, "version": 2}},
    }
    if what == "model":
        state["model"] = wrong_shape(model)
    elif what == "optimizer":
        state["optimizer"] = adamw(nn.Linear(2, 2).parameters()).state_dict()
    elif what == "amp":
        state["amp"]["mine"] = {}
    else:
        state["other"] = {"epoch": 2}
    checkpoint_file.write_file(path, state)
    amp.close()

    model, optimizer = started(level, adamw)
    train(NORMED_MLP, model, optimizer, "ccc")
    before = everything(model, optimizer)
    with pytest.raises(AmpStateError, match=rf"(?s)checkpoint\.pt does not fit, and nothing .*{what}: .+"):
        amp.load(path, model=model, optimizer=optimizer, other=Refuses())
    assert_bitwise(everything(model, optimizer), before)
    train(NORMED_MLP, model, optimizer, "cc", first=3)
    after = everything(model, optimizer)
    amp.close()

    model, optimizer = started(level, adamw)
    train(NORMED_MLP, model, optimizer, "ccccc")
    assert_bitwise(everything(model, optimizer), after)


class Stubborn:
    """Refuses every state, its own too."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("of another run"), KeyboardInterrupt()], ids=["refuses", "interrupted"])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_what_refuses_its_earlier_state_keeps_no_other_from_its_own(
    path: Path, level: str, error: BaseException
) -> None:
    model, optimizer = started(level, adamw, seed=5)
    train(NORMED_MLP, model, optimizer, "cc")
    amp.save(path, model=model, other={"epoch": 2}, optimizer=optimizer)
    amp.close()
    model, optimizer = started(level, adamw)
    train(NORMED_MLP, model, optimizer, "ccc")
    before = everything(model, optimizer)
    with pytest.raises((AmpStateError, KeyboardInterrupt)) as raised:
        amp.load(path, model=model, optimizer=optimizer, other=Stubborn(error))
    if isinstance(error, RuntimeError):
        said = "only other may hold a part of it.  other: of another run  Its earlier state was refused as well"
        assert said in str(raised.value)
    else:
        assert raised.value is error
    assert_bitwise(everything(model, optimizer), before)


@pytest.mark.parametrize(
    ("objects", "error", "text"),
    [
        ({"modle": nn.Linear(2, 2)}, AmpValueError, r"has no 'modle'\.  It has 'model', 'list', 'amp'"),
        ({"model": 3}, AmpTypeError, "model is a int, which has no load_state_dict"),
        ({"list": [nn.Linear(2, 2)]}, AmpValueError, r"list is to be loaded into \[0\], and saved was \[0, 1\]"),
        ({"list": {"a": nn.Linear(2, 2)}}, AmpValueError, r"list is to be loaded into \['a'\], and saved was \[0, 1\]"),
        ({"model": [nn.Linear(2, 2)]}, AmpValueError, r"saved was \['0.weight'"),
    ],
)
def test_what_was_not_saved_is_refused_by_name(path: Path, objects: Any, error: Any, text: str) -> None:
    model, optimizer = started("O2")
    amp.save(path, model=model, list=[1, 2])
    with left_alone(model, optimizer), pytest.raises(error, match=text):
        amp.load(path, **objects)


@pytest.mark.parametrize("deep", [False, True])
def test_tuples_come_back_as_tuples(path: Path, deep: bool) -> None:
    started("O2")
    state = random.getstate()
    truth = [random.random() for _ in range(5)]
    value: Any = {"deep": [((1, (2.0, "b")), [()], {"x": (None,)})], "rng": state} if deep else state
    amp.save(path, value=value)
    loaded = amp.load(path)["value"]
    assert loaded == value
    assert torch.load(path)["value"] == value
    random.setstate(loaded["rng"] if deep else loaded)
    assert [random.random() for _ in range(5)] == truth


class Pair(NamedTuple):
    one: int
    two: int


def test_a_named_tuple_is_refused_with_what_to_save_in_its_place(path: Path) -> None:
    started("O2")
    with pytest.raises(AmpTypeError, match=r"value\._asdict\(\)"):
        amp.save(path, pair=Pair(1, 2))
    amp.save(path, pair=tuple(Pair(1, 2)))
    assert Pair(*amp.load(path)["pair"]) == Pair(1, 2)


class OfTheProgram:
    """A value that torch.load(weights_only=True) does not know."""


@pytest.mark.parametrize("value", [OfTheProgram(), OfTheProgram, {"deep": [OfTheProgram()]}, lambda: 0])
def test_what_could_not_be_loaded_is_not_saved(path: Path, value: Any) -> None:
    started("O2")
    amp.save(path, epoch=1)
    before = path.read_bytes()
    with pytest.raises((AmpTypeError, AttributeError, pickle.PicklingError)):
        amp.save(path, epoch=value)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("room", [0, 100, 3000])
@pytest.mark.parametrize("was_there", [True, False])
def test_a_full_disk_is_said_and_the_old_file_is_there(
    path: Path, was_there: bool, room: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = started("O2")
    if was_there:
        amp.save(path, epoch=1)
    before = path.read_bytes() if was_there else None
    fdopen = os.fdopen

    def on_a_full_disk(descriptor: int, mode: str) -> Any:
        file = fdopen(descriptor, mode, buffering=0)
        left = [room]

        def write(data: Any) -> int:
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
            return type(file).write(file, data)  # type: ignore[no-any-return]

        return Through(file, write)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", on_a_full_disk)
        expected = f"(?s){os.strerror(number)}.*{'as it was' if was_there else 'no file of this name'}.*checkpoint.pt"
        with pytest.raises(OSError, match=expected) as raised:
            amp.save(path, model=model, more=torch.zeros(1000))
    assert raised.value.errno == number
    assert "unexpected pos" not in str(raised.value)
    assert os.listdir(path.parent) == ([path.name] if was_there else [])
    if was_there:
        assert path.read_bytes() == before
        assert amp.load(path)["epoch"] == 1


class Through:
    """A file with another `write`."""

    def __init__(self, file: Any, write: Any) -> None:
        self._file, self.write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Through:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_only_a_file_is_replaced(path: Path, kind: str) -> None:
    """The same would befall /dev/null."""
    if kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    before = path.stat()
    with pytest.raises(AmpValueError, match="is a directory or a device"):
        amp.save(path, epoch=1)
    assert path.stat() == before
    assert os.listdir(path.parent) == [path.name]


# --- damage ---------------------------------------------------------------------------------------


def fixed_places(data: bytes) -> list[int]:
    """Bits at the beginning, in the pickle, in tensors, in the directory of the archive, its end, tag and digest."""
    ends = [0, len(data) // 2, data.index(b"PK\x01\x02"), data.rindex(b"PK\x05\x06"), len(data) - 84, len(data) - 64]
    places = [8 * end + bit for end in ends for bit in (0, 77, 163)]
    return [*places, 8 * (len(data) - 1), 8 * len(data) - 1]


def test_twenty_bits_and_twenty_cuts_are_each_refused_by_name_and_change_nothing(path: Path) -> None:
    model, optimizer = started("O2", adamw)
    train(NORMED_MLP, model, optimizer, "co")
    amp.save(path, model=model, optimizer=optimizer, step=2)
    train(NORMED_MLP, model, optimizer, "c", first=2)
    data = path.read_bytes()
    bits = fixed_places(data)
    assert len(set(bits)) == 20
    cuts = [0, 1, len(data) - 1, len(data) - 64, len(data) - 84, len(data) - 106]
    cuts += [n * len(data) // 15 for n in range(1, 15)]
    damages = [flipped(data, bit) for bit in bits] + [(f"cut to {n}", data[:n]) for n in cuts]
    damages.append(("something added", data + b"\0"))
    with left_alone(model, optimizer):
        numbers = scaler_numbers()
        for what, changed in damages:
            path.write_bytes(changed)
            with pytest.raises(AmpFileError, match=r"checkpoint\.pt is damaged.* expected .*found ") as caught:
                amp.load(path, model=model, optimizer=optimizer)
            assert isinstance(caught.value, RuntimeError), what
            assert scaler_numbers() == numbers
    path.write_bytes(data)
    assert amp.load(path, model=model, optimizer=optimizer) == {"step": 2}


@pytest.mark.parametrize("archive", [True, False])
def test_a_file_of_torch_save_is_sent_to_torch_load(path: Path, archive: bool) -> None:
    torch.save({"model": torch.ones(3)}, path, _use_new_zipfile_serialization=archive)
    with pytest.raises(AmpFileError, match=r"was written by torch\.save, .* Load it with torch\.load\('") as caught:
        amp.load(path)
    assert "damaged" not in str(caught.value)


def test_what_only_resembles_a_file_of_torch_save_is_damaged(path: Path) -> None:
    amp.save(path, model=nn.Linear(2, 2))
    whole = path.read_bytes()
    torch.save({"model": 1}, path)
    saved = path.read_bytes()
    for data in (b"", b"PK", whole[:-84], saved[:-1], saved[1:], saved[-22:], saved[:40]):
        path.write_bytes(data)
        with pytest.raises(AmpFileError, match="is damaged, or not of amp"):
            amp.load(path)


# --- the writing ----------------------------------------------------------------------------------


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "run-1.pt", tmp_path / "latest.pt"
    amp.save(target, epoch=1)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~mask
    target.chmod(0o640)
    link.symlink_to(target)
    amp.save(link, epoch=2)
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert amp.load(target) == {"epoch": 2}


def test_what_others_are_writing_is_left_alone_and_what_the_dead_left_is_removed(tmp_path: Path) -> None:
    """Names that a pattern could mistake, too."""
    path = tmp_path / "run[1]*.pt"
    with checkpoint_file._beside(path) as (file, mine):
        file.write(b"half")
        dead = mine.with_name(f".{path.name}.{'0' * 16}.partial")
        other = mine.with_name(f".run1x.pt.{'0' * 16}.partial")
        dead.write_bytes(b"left")
        other.write_bytes(b"left")
        amp.save(path, epoch=1)
        assert sorted(os.listdir(tmp_path)) == sorted([path.name, mine.name, other.name])
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, other.name])


def test_a_file_that_was_taken_for_abandoned_before_it_was_locked_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, seen = checkpoint_file._lock, []

    def meets_another(descriptor: int) -> bool:
        seen.append(descriptor)
        if len(seen) == 1:
            return False  # another process has the lock, and is about to remove the file
        if len(seen) == 2:
            for entry in path.parent.glob(".*.partial"):  # it did, before the lock was ours
                entry.unlink()
        return lock(descriptor)

    monkeypatch.setattr(checkpoint_file, "_lock", meets_another)
    amp.save(path, epoch=1)
    assert len(seen) == 3
    assert amp.load(path) == {"epoch": 1}
    assert os.listdir(path.parent) == [path.name]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.mark.slow
def test_killed_before_each_operation_of_a_save_the_run_resumes_bitwise(nursery: Nursery, tmp_path: Path) -> None:
    truth = nursery.run(tmp_path / "truth.pt", LAST)
    assert not truth.killed
    base = tmp_path / "base.pt"
    nursery.run(base, 2)
    before = base.read_bytes()
    operations = nursery.run(tmp_path / "whole.pt", 1).operations
    changes = [name for i, name in enumerate(operations) if operations[i - 1 : i] != [name]]
    remaining = iter(changes)
    assert all(step in remaining for step in STEPS_OF_A_SAVE), changes

    numbers = [i for i, name in enumerate(operations) if name != "write" or i % 16 == 0]
    for number in numbers:
        path = tmp_path / f"{number}" / "checkpoint.pt"
        path.parent.mkdir()
        path.write_bytes(before)
        outcome = nursery.run(path, 3, kill_before=number)
        assert outcome.killed
        assert len(outcome.operations) == number
        is_new = "replace" in outcome.operations
        assert (path.read_bytes() == before) == (not is_new), operations[number]
        resumed = nursery.run(path, LAST)
        assert min(resumed.digests) == (3 if is_new else 2)
        assert resumed.digests == {step: truth.digests[step] for step in resumed.digests}, operations[number]
        assert os.listdir(path.parent) == [path.name], "the next save removes what was left"
    assert {operations[number] for number in numbers} >= set(STEPS_OF_A_SAVE)
