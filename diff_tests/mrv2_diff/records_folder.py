"""The folder that a run writes its records to, such that no interruption loses a written one."""

import errno
import os
import tempfile
from pathlib import Path

from mrv2_diff import record as records_file
from mrv2_diff.record import Record

RECORDS = "records.jsonl"
PREVIOUS = "records.previous.jsonl"

_PROBE_BYTES = 64 * 1024
"""More than a record of a long case takes; a disk with less room is as good as full."""


class RecordsFolderError(Exception):
    """The folder cannot take records. Names the folder, the system's reason and the remedy."""


class RecordsFolder:
    """Reads what a folder holds and appends to it; the former run's file is kept as the previous.

    Args:
        folder: Made if it is missing.
        resume: Whether to add to the records that are there. Otherwise they are moved aside, and
            not before the first new record is written.

    Raises:
        RecordsFolderError: The folder cannot be written.
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self.folder = folder
        self.path = folder / RECORDS
        self._moves_former = not resume
        try:
            _probe(folder)
            if resume:
                _drop_torn_line(self.path)
        except OSError as error:
            raise self._refusal(error) from error

    def records(self) -> list[Record]:
        """Return the records that the run goes on from; none unless it resumes.

        Raises:
            ValueError: The file holds something that is no record.
        """
        if self._moves_former or not self.path.exists():
            return []
        return list(records_file.read(self.path))

    def append(self, record: Record) -> None:
        """Add one record, whole or not at all, in place of an earlier one of the same case.

        The same case on another pair of runners or another model, or in its small form, is another
        record.

        Raises:
            RecordsFolderError: The disk is full or the folder is no longer writable.
        """
        try:
            if self._moves_former and self.path.exists():
                self.path.replace(self.folder / PREVIOUS)
            self._moves_former = False
            others = self._others(record)
            if others is None:
                records_file.append(self.path, record)
            else:
                self._rewrite(others + record.to_json() + b"\n")
        except OSError as error:
            self._undo_torn_write()
            raise self._refusal(error) from error

    def _others(self, record: Record) -> bytes | None:
        """Return the lines of all other cases; None where the file has only those."""
        if not self.path.exists():
            return None
        lines = self.path.read_bytes().splitlines(keepends=True)
        others = [line for line in lines if _case(records_file.decode(line)) != _case(record)]
        return b"".join(others) if len(others) < len(lines) else None

    def _rewrite(self, content: bytes) -> None:
        partial = self.path.with_name(f".{RECORDS}.partial")
        try:
            partial.write_bytes(content)
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)

    def _undo_torn_write(self) -> None:
        try:
            _drop_torn_line(self.path)
        except OSError:
            return  # the reader skips a torn last line, and a resumed run drops it

    def _refusal(self, error: OSError) -> RecordsFolderError:
        reason = error.strerror or str(error)
        return RecordsFolderError(
            f"cannot write to the report folder {self.folder}: {reason}; "
            f"make room or mend its permissions, or name another with --out"
        )


def _case(record: Record) -> tuple[object, ...]:
    made = record.environment
    return record.id, record.pair, made.get("model"), made.get("form")


def _probe(folder: Path) -> None:
    """Write and remove as much as a record takes, so that a full disk shows before the work."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"\n" * _PROBE_BYTES)
        probe.flush()
        os.fsync(probe.fileno())


def _drop_torn_line(path: Path) -> None:
    """Cut off what follows the last newline: a record whose writing was interrupted."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
