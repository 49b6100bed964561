"""Entries of the books as rows of the file, and back. Pure.

Invariant: a row holds times of the wall clock, an entry of the monotonic one: what is left to a deadline counts down
while no gateway runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fermata.v1 import tool_pb2

from tool_gateway.ledger.books import Entry
from tool_gateway.ledger.records import AttemptRecord, CallRecord, Ending

CALL_COLUMNS: Final = (
    "place INTEGER PRIMARY KEY, key TEXT NOT NULL, run_id TEXT NOT NULL, trajectory_id TEXT NOT NULL, "
    "key_generation INTEGER NOT NULL, generation INTEGER NOT NULL, session_id TEXT NOT NULL, tool TEXT NOT NULL, "
    "args_sha256 BLOB NOT NULL, request_bytes INTEGER NOT NULL, may_have_run_before INTEGER NOT NULL, "
    "received_at REAL NOT NULL, deadline_at REAL NOT NULL, joined INTEGER NOT NULL, attempts TEXT NOT NULL, "
    # of a call that is done
    "finished INTEGER, finished_at REAL, acked INTEGER, outcome INTEGER, fault INTEGER, started INTEGER, detail TEXT, "
    "queue_us INTEGER, run_us INTEGER, instance_id TEXT, attempt_count INTEGER, output_bytes INTEGER"
)
CALL_WIDTH: Final = 27
_NOT_DONE: Final = (None,) * 12
_to_json: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Clock:
    """Both clocks, in seconds. `monotonic` is the one of the records' times."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def ahead(self) -> float:
        """What the wall clock shows more than the monotonic one now."""
        return self.wall() - self.monotonic()


def to_row(entry: Entry, ahead: float) -> Row:
    """`ahead`: the wall clock's reading less the monotonic one's."""
    record = entry.record
    attempts = [
        (a.number, a.instance_id, a.address, a.started_at + ahead, a.outcome, a.started, a.detail)
        for a in record.attempts
    ]
    row = (
        entry.place,
        record.key,
        record.run_id,
        record.trajectory_id,
        record.key_generation,
        record.generation,
        record.session_id,
        record.tool,
        record.args_sha256,
        record.request_bytes,
        record.foreign,
        record.received_at + ahead,
        record.deadline_at + ahead,
        entry.joined,
        _to_json(attempts) if attempts else "[]",
    )
    ending = record.outcome
    if ending is None:
        return row + _NOT_DONE
    final = ending.final
    return (
        *row,
        entry.finished,
        record.finished_at + ahead,
        entry.acked,
        final.outcome,
        final.fault,
        final.started,
        final.detail,
        ending.queue_us,
        ending.run_us,
        ending.instance_id,
        ending.attempts,
        ending.stored_bytes,
    )


def to_entry(row: Row, ahead: float, now: float) -> Entry:
    """`now`: of the monotonic clock. Raises ValueError or TypeError for a row that this program did not write.

    A call that comes from the future (the wall clock was set back) is taken as received now: it gets no more time than
    it had.
    """
    (
        place,
        key,
        run_id,
        trajectory_id,
        key_generation,
        generation,
        session_id,
        tool,
        args_sha256,
        request_bytes,
        foreign,
        received_at,
        deadline_at,
        joined,
        attempts,
        finished,
        finished_at,
        acked,
        outcome,
        fault,
        started,
        detail,
        queue_us,
        run_us,
        instance_id,
        attempt_count,
        output_bytes,
    ) = row
    back = ahead + max(0.0, received_at - ahead - now)
    ending = None
    if finished:
        final = tool_pb2.Final(outcome=outcome, fault=fault, started=started, detail=detail)
        ending = Ending(final, queue_us, run_us, instance_id, attempt_count, stored_bytes=output_bytes)
    record = CallRecord(
        key=key,
        run_id=run_id,
        trajectory_id=trajectory_id,
        key_generation=key_generation,
        generation=generation,
        session_id=session_id,
        tool=tool,
        args_sha256=args_sha256,
        received_at=received_at - back,
        deadline_at=deadline_at - back,
        attempts=tuple(
            AttemptRecord(number, instance, address, started_at - back, ended, began, why)
            for number, instance, address, started_at, ended, began, why in json.loads(attempts)
        ),
        outcome=ending,
        finished_at=min(finished_at - back, now) if finished else 0.0,
        acked=bool(acked),
        request_bytes=request_bytes,
        foreign=bool(foreign),
    )
    return Entry(place, record, joined, finished or 0, acked or 0)
