"""Checkpoint files that are written completely or not at all, and that show damage.

A file is a zip archive of torch.save with a comment at its end: the SHA-256 of all bytes before it.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import pickle
import secrets
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

from amp_engine.errors import AmpFileError, AmpTypeError, AmpValueError

_FIRST_RECORD = b"PK\x03\x04"  # of an archive; zipfile itself does not check that it is there
# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.16: the record that ends an archive. Its last two
# bytes are the length of the comment that follows.
_END_RECORD, _END_RECORD_SIZE = b"PK\x05\x06", 22
_TAG = b"amp_engine 1 sha256 "
_DIGEST_SIZE = 64  # hexadecimal
_COMMENT_SIZE = len(_TAG) + _DIGEST_SIZE

_BEFORE_ARCHIVES = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # the first bytes of torch.save before archives

_BLOCK = 2**20


def write_file(path: str | os.PathLike[str], value: Any) -> None:
    """Do torch.save(value, path), so that the file is the complete old one or the complete new one at any time.

    Writes a file beside the old one, waits until its bytes are on the disk, and renames it; follows a link. Removes
    temporary files of the same name that killed processes left.

    Raises AmpValueError if `path` is no file, AmpTypeError if torch.load(weights_only=True) would not load the value,
    and the errors of torch.save and the operating system. The old file is then unchanged, and no new one is left.
    """
    try:
        _write_file(path, value)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        kept = "the file of before is as it was" if os.path.exists(path) else "there is no file of this name"
        raise OSError(
            e.errno,
            f"{os.strerror(e.errno)}.  Nothing was saved, and {kept}.  The new file is written beside the old one, so "
            "there must be room for both: delete earlier checkpoints or save to another disk",
            os.fspath(path),
        ) from e


def _write_file(path: str | os.PathLike[str], value: Any) -> None:
    target = Path(os.fsdecode(os.path.realpath(path)))
    if target.exists() and not target.is_file():  # a rename would replace even /dev/null with a file
        raise AmpValueError(f"{os.fspath(path)} is a directory or a device.  Use the path of a file.")
    _remove_abandoned(target)
    with _beside(target) as (file, temporary):
        checked = _Checked(file)
        try:
            torch.save(value, cast(IO[bytes], checked))
        except Exception:
            if checked.failure is not None:  # torch raises an unexpected position instead
                raise checked.failure from None
            raise
        checked.finish()
        file.flush()
        _check_that_it_loads(temporary)
        os.fsync(file.fileno())
        os.replace(temporary, target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot sync directories
            raise
    finally:
        os.close(directory)


def read_file(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Check that a file of `write_file` is not damaged, then read it. Executes nothing in it.

    Raises AmpFileError if it is damaged or another file, OSError if it cannot be read.
    """
    with open(path, "rb") as file:
        _check(file, os.fspath(path))
        file.seek(0)
        return torch.load(file, map_location=map_location, weights_only=True)


class _Checked:
    """A file to write to, which computes the SHA-256 of the written bytes and appends it.

    Attributes:
        failure: the first error of the operating system in a write.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.failure: OSError | None = None
        self._last = b""  # held back, as the record at the end must have the length of the comment

    def write(self, data: bytes | memoryview) -> int:
        """Write the bytes that were held back, and `data` except for its last bytes, which are held back now."""
        view = memoryview(data).cast("B")
        whole = len(view)
        if whole < _END_RECORD_SIZE:
            view = memoryview(self._last + bytes(view))
        else:
            self._put(self._last)
        end = max(0, len(view) - _END_RECORD_SIZE)
        self._put(view[:end])
        self._last = bytes(view[end:])
        return whole

    def flush(self) -> None:
        """Do nothing: files have this method, and no bytes can be flushed yet."""

    def finish(self) -> None:
        """Write the bytes that were held back, and the comment. Raises AmpFileError if the file is no archive."""
        if not (self._last.startswith(_END_RECORD) and self._last.endswith(b"\0\0")):
            raise AmpFileError(
                f"torch.save did not end with the record of a zip archive, but with {self._last!r}.  Set "
                "_use_new_zipfile_serialization back to True, or report the version of torch."
            )
        self._put(self._last[:-2] + _COMMENT_SIZE.to_bytes(2, "little") + _TAG)
        self._file.write(self._sha256.hexdigest().encode())

    def _put(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        try:
            self._file.write(data)
        except OSError as e:
            self.failure = self.failure or e
            raise


def _check_that_it_loads(path: Path) -> None:
    """Raise AmpTypeError if torch.load(weights_only=True) does not load the file. Maps tensors without reading them."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as e:
        reason = next((line for line in str(e).splitlines() if "Unsupported" in line or "GLOBAL" in line), str(e))
        raise AmpTypeError(
            "Not saved, since torch.load(weights_only=True) would not load it: "
            f"{reason.strip()}  Save numbers, strings, tensors, and lists, tuples and "
            "dictionaries of them; of a named tuple `tuple(value)` or `value._asdict()`."
        ) from e


def _check(file: IO[bytes], path: str) -> None:
    """Raise AmpFileError unless the SHA-256 at the end of `file` is that of the bytes before it."""
    size = os.fstat(file.fileno()).st_size
    body = size - _DIGEST_SIZE
    file.seek(max(0, body - len(_TAG)))
    tag = file.read(len(_TAG))
    if body < len(_TAG) or tag != _TAG:
        if _is_of_torch_save(file, size):
            raise AmpFileError(
                f"{path} was written by torch.save, not by amp.save.  Load it with torch.load({path!r}), and pass what "
                "amp.state_dict() gave to amp.load_state_dict."
            )
        raise AmpFileError(
            f"{path} is damaged, or not of amp.save: {_COMMENT_SIZE} bytes before the end of its {size} bytes, "
            f"expected {_TAG!r}, found {tag!r}.  Load an earlier file."
        )
    written = file.read(_DIGEST_SIZE)
    sha256 = hashlib.sha256()
    file.seek(0)
    for start in range(0, body, _BLOCK):
        sha256.update(file.read(min(_BLOCK, body - start)))
    if sha256.hexdigest().encode() != written:
        raise AmpFileError(
            f"{path} is damaged: expected the SHA-256 that stands at its end, {written.decode('ascii', 'replace')}, "
            f"found {sha256.hexdigest()}.  Load an earlier file."
        )


def _is_of_torch_save(file: IO[bytes], size: int) -> bool:
    """True if the file is one of torch.save itself: an archive without a comment, or the format before torch 1.6."""
    file.seek(0)
    begin = file.read(len(_FIRST_RECORD))
    file.seek(max(0, size - _END_RECORD_SIZE))
    end = file.read()
    if begin == _FIRST_RECORD and end.startswith(_END_RECORD) and end.endswith(b"\0\0"):
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    file.seek(0)
    return file.read(len(_BEFORE_ARCHIVES)) == _BEFORE_ARCHIVES


def _lock(descriptor: int) -> bool:
    """Lock a file. True if this process now has the lock, or if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def _beside(target: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Yield a new, locked file beside `target`, and its path; delete the file at the end unless it was renamed."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if _lock(descriptor) and temporary.exists():  # no process took it for abandoned before it was locked
            break
        os.close(descriptor)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with suppress(OSError):
                os.fchmod(descriptor, stat.S_IMODE(os.stat(target).st_mode))
            yield file, temporary
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def _remove_abandoned(target: Path) -> None:
    """Remove temporary files of this name that dead processes left: files without a lock."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)
