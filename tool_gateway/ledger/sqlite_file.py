"""The ledger's SQLite file: opened for one process alone, read once at the start, written one transaction at a time.

Invariant: a row per entry of the books, by its place; nothing is looked up here but outputs, so that no index but the
place is kept and new rows lie side by side. What a released call leaves is used again: the file does not outgrow what
the settings bound, and does not shrink. Zeros over what was deleted only where that costs no further page.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.errors import EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_USAGE, NodeError
from tool_gateway.ledger.books import Books, Entry, Mark, Owner, Trajectory
from tool_gateway.ledger.sqlite_rows import (
    READ_CALLS,
    TABLES,
    Clock,
    Row,
    attempts_row,
    call_row,
    result_row,
    to_entry,
)
from tool_gateway.ledger.store import LedgerUnavailable

FILE_NAME: Final = "ledger.sqlite3"
APPLICATION_ID: Final = 0x666D7431  # "fmt1"
SCHEMA_VERSION: Final = 1
_SCHEMA: Final = (
    *(f"CREATE TABLE {table} ({columns})" for table, columns in TABLES.items()),
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_WIDTHS: Final = {table: columns.count(",") + 1 for table, columns in TABLES.items()}
_LOCK_WAIT_S: Final = 2.0
_WAL_BYTES: Final = 64 << 20
_MOST_ROWS: Final = 256

Stored = tuple[list[Entry], list[tuple[str, Mark]], list[tuple[Trajectory, Owner]]]


class LedgerFile:
    """One thread opens, uses and closes it."""

    def __init__(self, folder: Path, synchronous: Literal["normal", "full"], clock: Clock) -> None:
        """Opens the file, making it and its folder where they are not. Raises NodeError with what would be right."""
        self.path = folder / FILE_NAME
        self._clock = clock
        _make(folder, self.path)
        try:
            self._db = sqlite3.connect(
                f"file:{quote(str(self.path))}?mode=rw",
                uri=True,
                isolation_level=None,
                timeout=_LOCK_WAIT_S,
                cached_statements=256,
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from None
        try:
            self._prepare(synchronous)
            _sync_folder(folder)
        except sqlite3.Error as error:
            self._db.close()
            raise self._unusable(error) from None
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, synchronous: str) -> None:
        run = self._db.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        (application_id,) = run("PRAGMA application_id").fetchone()
        (version,) = run("PRAGMA user_version").fetchone()
        (tables,) = run("SELECT count(*) FROM sqlite_master").fetchone()
        if (tables or version) and application_id != APPLICATION_ID:
            raise NodeError(
                f"gateway.data_dir: {self.path} is not a call ledger: name a folder that the gateway has for itself",
                EXIT_USAGE,
            )
        if version > SCHEMA_VERSION:
            raise NodeError(
                f"gateway.data_dir: {self.path} was written by a newer version (its schema is {version}, this program "
                f"knows {SCHEMA_VERSION}): start that version, or name another folder",
                EXIT_USAGE,
            )
        (mode,) = run("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise NodeError(
                f"gateway.data_dir: {self.path} lies on a file system without a write-ahead log (SQLite chose {mode}): "
                "name a folder on a local disk",
                EXIT_USAGE,
            )
        run(f"PRAGMA synchronous = {synchronous}")
        run(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        run("PRAGMA secure_delete = FAST")
        run("PRAGMA temp_store = MEMORY")
        run("BEGIN IMMEDIATE")  # from here on nobody else gets in, even to read
        if not tables:
            for statement in _SCHEMA:
                run(statement)
        run("COMMIT")

    def read(self) -> Stored:
        """All but the outputs. Raises NodeError where the file is damaged."""
        now, ahead = self._clock.monotonic(), self._clock.ahead()
        state_of = gateway_pb2.GetCallResponse.CallState.Name
        try:
            run = self._db.execute
            entries = [to_entry(row, ahead, now) for row in run(READ_CALLS)]
            gone = []
            for place, key, state in run("SELECT place, key, state FROM gone ORDER BY place"):
                state_of(state)
                gone.append((key, Mark(place, state)))
            owners = [
                ((run_id, trajectory_id), Owner(place, generation))
                for place, run_id, trajectory_id, generation in run(
                    "SELECT place, run_id, trajectory_id, generation FROM owners ORDER BY place"
                )
            ]
        except sqlite3.Error as error:
            raise self._unusable(error) from None
        except (ValueError, TypeError, KeyError) as error:
            raise self._damaged(str(error)) from None
        if len({entry.record.key for entry in entries}) < len(entries):
            raise self._damaged("a key stands in it twice")
        return entries, gone, owners

    def read_output(self, place: int) -> tool_pb2.Final:
        """Raises LedgerUnavailable where it cannot be read."""
        try:
            row = self._db.execute("SELECT final FROM results WHERE place = ?", (place,)).fetchone()
            if row is not None:
                return tool_pb2.Final.FromString(row[0])
            why = "it is not there"
        except Exception as error:  # noqa: BLE001 (SQLite's errors, and those of a message that was damaged)
            why = str(error)
        raise LedgerUnavailable(f"a result in the ledger {self.path} cannot be read: {why}")

    def write(self, books: Books, finals: Mapping[int, tool_pb2.Final]) -> None:
        """Commit what the books note as changed. `finals` by place. Raises LedgerUnavailable, and then nothing is."""
        ahead = self._clock.ahead()
        rows: dict[str, list[Row]] = {table: [] for table in TABLES}
        dead: dict[str, list[int]] = {table: [] for table in TABLES}
        for key, old in books.changes.calls.items():
            new = books.calls.get(key)
            if old is not None and (new is None or new.place != old.place):
                _bury(old, dead)
                old = None
            if new is not None:
                _note(old, new, finals, ahead, rows, dead)
        try:
            self._db.execute("BEGIN IMMEDIATE")
            if books.changes.gone:
                self._forget_marks(books, books.changes.gone)
                rows["gone"] += [
                    (mark.place, key, mark.state) for key in books.changes.gone if (mark := books.gone.get(key))
                ]
            for trajectory, was in books.changes.owners.items():
                if was is not None:
                    dead["owners"].append(was.place)
                if (owner := books.owners.get(trajectory)) is not None:
                    rows["owners"].append((owner.place, *trajectory, owner.generation))
            for table, places in dead.items():
                self._delete(table, places)
            for table, new_rows in rows.items():
                self._replace(table, new_rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerUnavailable(f"the ledger {self.path} cannot be written: {_words(error)}") from None

    def _forget_marks(self, books: Books, touched: Mapping[str, Mark | None]) -> None:
        """Marks that went were the oldest."""
        if any(touched.values()):
            oldest = next((mark.place for mark in books.gone.values()), 1 << 62)
            self._db.execute("DELETE FROM gone WHERE place < ?", (oldest,))

    def _replace(self, table: str, rows: Sequence[Row]) -> None:
        """In as few statements as there are powers of two in their number: each one is a trip through the interpreter's
        lock."""
        place = f"({','.join('?' * _WIDTHS[table])})"
        for part in _parts(rows):
            values = part[0] if len(part) == 1 else [value for row in part for value in row]
            self._db.execute(f"REPLACE INTO {table} VALUES {','.join([place] * len(part))}", values)

    def _delete(self, table: str, places: Sequence[int]) -> None:
        for part in _parts(places):
            self._db.execute(f"DELETE FROM {table} WHERE place IN ({','.join('?' * len(part))})", part)

    def roll_back(self) -> None:
        if self._db.in_transaction:  # some errors have rolled back already
            self._db.execute("ROLLBACK")

    def close(self) -> None:
        """The log goes into the file, and away."""
        self._db.close()

    def _unusable(self, error: sqlite3.Error) -> NodeError:
        where = f"gateway.data_dir: {self.path}"
        match _code(error):
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                sentence = f"{where} is in use by another gateway: give each gateway a folder of its own"
                return NodeError(sentence, EXIT_UNAVAILABLE)
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return self._damaged(str(error))
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
                sentence = f"{where} cannot be written ({error}): let the gateway's user write there, or name another"
                return NodeError(sentence, EXIT_USAGE)
        return NodeError(f"{where} cannot be used: {_words(error)}", EXIT_FAILED)

    def _damaged(self, why: str) -> NodeError:
        return NodeError(
            f"gateway.data_dir: {self.path} is damaged ({why}): restore it, or move it away with the calls it holds",
            EXIT_FAILED,
        )


def _bury(entry: Entry, dead: Mapping[str, list[int]]) -> None:
    """The entry's rows are to go."""
    dead["calls"].append(entry.place)
    if entry.record.attempts:
        dead["attempts"].append(entry.place)
    if entry.finished:
        dead["results"].append(entry.place)
    if entry.acked:
        dead["acknowledged"].append(entry.place)


def _note(
    old: Entry | None,
    new: Entry,
    finals: Mapping[int, tool_pb2.Final],
    ahead: float,
    rows: Mapping[str, list[Row]],
    dead: Mapping[str, list[int]],
) -> None:
    """The rows in which the entry differs from the old one (None: all it has)."""
    record = new.record
    if old is None or old.joined != new.joined or old.record.generation != record.generation:
        rows["calls"].append(call_row(new, ahead))
    if record.attempts and (old is None or old.record.attempts is not record.attempts):
        rows["attempts"].append(attempts_row(new, ahead))
    if record.outcome is not None and (old is None or not old.finished):
        rows["results"].append(result_row(new, record.outcome, finals[new.place], ahead))
    if new.acked and (old is None or old.acked != new.acked):
        rows["acknowledged"].append((new.place, new.acked))
    elif old is not None and old.acked and not new.acked:  # another session has to hear of it
        dead["acknowledged"].append(new.place)


def _make(folder: Path, path: Path) -> None:
    """The folder for its owner alone, and an empty file in it likewise; SQLite gives its log the file's permissions."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # Never opened where it exists: closing a file lets go of every lock that the process has on it.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            if not path.is_file():
                raise NodeError(f"gateway.data_dir: {path} is not a file: move it away", EXIT_USAGE) from None
        if not (os.access(path, os.R_OK | os.W_OK) and os.access(folder, os.W_OK | os.X_OK)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise NodeError(
            f"gateway.data_dir: {path} cannot be written ({error.strerror or error}): "
            "name a folder that the gateway's user may write to",
            EXIT_USAGE,
        ) from None


def _sync_folder(folder: Path) -> None:
    """A file that was made is there after a power cut, too."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _parts(items: Sequence[Any]) -> list[Sequence[Any]]:
    """The items in parts whose sizes are powers of two, so that there are few different statements."""
    parts, at = [], 0
    while at < len(items):
        size = min(_MOST_ROWS, 1 << ((len(items) - at).bit_length() - 1))
        parts.append(items[at : at + size])
        at += size
    return parts


def _code(error: sqlite3.Error) -> int | None:
    """The primary result code; None for an error of the binding itself."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _words(error: sqlite3.Error) -> str:
    if _code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return f"{error}; make room on its disk, or repair it"
    return str(error)
