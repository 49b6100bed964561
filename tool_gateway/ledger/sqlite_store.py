"""Books and file together, as the one thread that owns both sees them.

Invariant: between two transactions the books are what the file is. Outputs are in the file alone: in memory a finished
call has a head.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from fermata.v1 import tool_pb2

from node_runtime.logs import get_logger
from tool_gateway.ledger.books import Books
from tool_gateway.ledger.records import AttemptRecord, CallRecord, Ending
from tool_gateway.ledger.sqlite_file import LedgerFile
from tool_gateway.ledger.sqlite_rows import Clock
from tool_gateway.ledger.store import Creation, Exists, Fenced, Gone, LedgerUnavailable
from tool_gateway.settings import LedgerSettings

_log = get_logger(__name__)
_REMIND_S: Final = 10.0


class SqliteStore:
    """The steps of ``LedgerStore`` that need more than the books, and the ``Medium`` of a ``GroupCommit``."""

    def __init__(self, folder: Path, settings: LedgerSettings, clock: Clock) -> None:
        self._folder = folder
        self._settings = settings
        self._clock = clock
        self.books = Books(settings, noting=True)
        self._finals: dict[int, tool_pb2.Final] = {}
        """Outputs of this transaction, by place."""
        self._failing = False
        self._reminded_at = float("-inf")

    # -- the medium --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._file = LedgerFile(self._folder, self._settings.synchronous, self._clock)
        try:
            self.books.restore(*self._file.read())
        except BaseException:
            self._file.close()
            raise

    def commit(self) -> None:
        if not self.books.changes:
            return
        try:
            self._file.write(self.books, self._finals)
        except LedgerUnavailable as problem:
            self._remind(str(problem))
            raise
        self.books.keep()
        self._finals.clear()
        if self._failing:
            self._failing = False
            _log.warning("the ledger can be written again", path=str(self._file.path))

    def undo(self) -> None:
        self._file.roll_back()
        self.books.undo()
        self._finals.clear()

    def close(self) -> None:
        self._file.close()

    def _remind(self, problem: str) -> None:
        now = self._clock.monotonic()
        if not self._failing or now - self._reminded_at >= _REMIND_S:
            self._failing, self._reminded_at = True, now
            _log.error(problem)

    # -- the steps that see outputs ----------------------------------------------------------------------------------

    def create(self, record: CallRecord) -> Creation:
        creation = self.books.create(record)
        if isinstance(creation, Exists):
            return Exists(self._whole(creation.record), creation.previous_session_id)
        return creation

    def load(self, key: str) -> CallRecord | Gone | None:
        held = self.books.load(key)
        return self._whole(held) if isinstance(held, CallRecord) else held

    def begin_attempt(self, key: str, attempt: AttemptRecord) -> CallRecord | Fenced | None:
        begun = self.books.begin_attempt(key, attempt)
        return self._whole(begun) if isinstance(begun, CallRecord) else begun

    def finish(self, key: str, outcome: Ending, now: float) -> CallRecord | None:
        head = outcome.to_head()
        record = self.books.finish(key, head, now)
        if record is None or record.outcome is not head:
            return self._whole(record) if record is not None else None
        self._finals[self.books.calls[key].place] = outcome.final
        return record.with_outcome(outcome, now)

    def _whole(self, record: CallRecord) -> CallRecord:
        """The record with its output, where it has one."""
        ending = record.outcome
        if ending is None:
            return record
        place = self.books.calls[record.key].place
        final = self._finals.get(place) or self._file.read_output(place)
        return replace(record, outcome=replace(ending, final=final, stored_bytes=0))
