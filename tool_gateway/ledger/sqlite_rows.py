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

TABLES: Final = {
    # What a step changes stands in a table of its own: a row is rewritten only where its call changes hands.
    "calls": (
        "place INTEGER PRIMARY KEY, key TEXT NOT NULL, run_id TEXT NOT NULL, trajectory_id TEXT NOT NULL, "
        "key_generation INTEGER NOT NULL, generation INTEGER NOT NULL, session_id TEXT NOT NULL, tool TEXT NOT NULL, "
        "args_sha256 BLOB NOT NULL, request_bytes INTEGER NOT NULL, may_have_run_before INTEGER NOT NULL, "
        "received_at REAL NOT NULL, deadline_at REAL NOT NULL, joined INTEGER NOT NULL"
    ),
    "attempts": "place INTEGER PRIMARY KEY, attempts TEXT NOT NULL",
    "results": (
        "place INTEGER PRIMARY KEY, finished INTEGER NOT NULL, finished_at REAL NOT NULL, outcome INTEGER NOT NULL, "
        "fault INTEGER NOT NULL, started INTEGER NOT NULL, detail TEXT NOT NULL, queue_us INTEGER NOT NULL, "
        "run_us INTEGER NOT NULL, instance_id TEXT NOT NULL, attempt_count INTEGER NOT NULL, "
        "output_bytes INTEGER NOT NULL, final BLOB NOT NULL"
    ),
    "acknowledged": "place INTEGER PRIMARY KEY, acked INTEGER NOT NULL",
    "gone": "place INTEGER PRIMARY KEY, key TEXT NOT NULL, state INTEGER NOT NULL",
    "owners": (
        "place INTEGER PRIMARY KEY, run_id TEXT NOT NULL, trajectory_id TEXT NOT NULL, generation INTEGER NOT NULL"
    ),
}
READ_CALLS: Final = """
    SELECT calls.*, attempts, finished, finished_at, outcome, fault, started, detail, queue_us, run_us, instance_id,
        attempt_count, output_bytes, acked
    FROM calls LEFT JOIN attempts USING (place) LEFT JOIN results USING (place) LEFT JOIN acknowledged USING (place)
    ORDER BY place
"""
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


def call_row(entry: Entry, ahead: float) -> Row:
    """`ahead`: the wall clock's reading less the monotonic one's."""
    record = entry.record
    return (
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
    )


def attempts_row(entry: Entry, ahead: float) -> Row:
    attempts = [
        (a.number, a.instance_id, a.address, a.started_at + ahead, a.outcome, a.started, a.detail)
        for a in entry.record.attempts
    ]
    return entry.place, _to_json(attempts)


def result_row(entry: Entry, ending: Ending, final: tool_pb2.Final, ahead: float) -> Row:
    return (
        entry.place,
        entry.finished,
        entry.record.finished_at + ahead,
        final.outcome,
        final.fault,
        final.started,
        final.detail,
        ending.queue_us,
        ending.run_us,
        ending.instance_id,
        ending.attempts,
        ending.stored_bytes,
        final.SerializeToString(),
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
        outcome,
        fault,
        started,
        detail,
        queue_us,
        run_us,
        instance_id,
        attempt_count,
        output_bytes,
        acked,
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
            for number, instance, address, started_at, ended, began, why in json.loads(attempts or "[]")
        ),
        outcome=ending,
        finished_at=min(finished_at - back, now) if finished else 0.0,
        request_bytes=request_bytes,
        foreign=bool(foreign),
    )
    return Entry(place, record, joined, finished or 0, acked or 0)
