"""One client session: results numbered, kept until acknowledged, sent within the client's window. Pure.

Invariant: every result added is offered to each stream that the session gets, in order of seq, until it is
acknowledged; what waits for the window never holds up control events.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fermata.v1 import gateway_pb2

Event = gateway_pb2.ServerFrame.Event

MAX_CONTROL: Final = 65_536
MAX_CHUNK_BYTES: Final = 1 << 20
MAX_PROGRESS: Final = 4096
MAX_REFUSED_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class _Numbered:
    seq: int
    key: str
    size: int
    event: Event
    refusal: bool = False


class Session:
    """State of one session_id at one incarnation of the gateway; streams come and go."""

    def __init__(self, session_id: str, run_id: str, node_id: str, tenant: str, window_bytes: int) -> None:
        self.session_id = session_id
        self.run_id = run_id
        self.node_id = node_id
        self.tenant = tenant
        self.epoch = 0
        self.detached_at: float | None = None
        """When the last stream ended; None while there is one."""
        self.window_bytes = window_bytes
        self.next_seq = 1
        self._unacked: OrderedDict[int, _Numbered] = OrderedDict()
        self._unacked_keys: dict[str, int] = {}
        self._unsent: deque[_Numbered] = deque()
        self._sent_bytes = 0  # sent on this stream and not acknowledged
        self._refused_bytes = 0  # of unacknowledged refusals
        self._control: deque[Event] = deque()
        self._chunks: deque[Event] = deque()
        self._chunk_bytes = 0
        self._progress: OrderedDict[str, Event] = OrderedDict()

    # -- what the gateway has to say ---------------------------------------------------------------------------------

    def add_result(self, result: gateway_pb2.ServerFrame.Result) -> int:
        """Numbers the result and queues it. Returns the seq."""
        return self._number(result, refusal=False)

    def _number(self, result: gateway_pb2.ServerFrame.Result, *, refusal: bool) -> int:
        seq = self.next_seq
        self.next_seq += 1
        event = Event()
        event.result.CopyFrom(result)
        event.result.seq = seq
        numbered = _Numbered(seq, result.key, event.ByteSize(), event, refusal)
        self._unacked[seq] = numbered
        if refusal:
            self._refused_bytes += numbered.size
        else:
            self._unacked_keys[result.key] = seq
        self._unsent.append(numbered)
        self._progress.pop(result.key, None)
        return seq

    def add_refusal(self, result: gateway_pb2.ServerFrame.Result) -> bool:
        """A result that no ledger holds. False, and nothing added: too many are unacknowledged."""
        if self._refused_bytes + result.ByteSize() > MAX_REFUSED_BYTES:
            return False
        self._number(result, refusal=True)
        return True

    def holds_result(self, key: str) -> bool:
        """A result of this key is on its way: it need not be sent again."""
        return key in self._unacked_keys

    def add_control(self, event: Event) -> bool:
        """Welcome, Accepted, Started, Catalogue, Drain, Pong. False: the client does not read, the bound is reached."""
        if len(self._control) >= MAX_CONTROL:
            return False
        self._control.append(event)
        return True

    def add_chunk(self, event: Event) -> None:
        """Output made visible early. Dropped where the client is slow: the result has all of it."""
        size = len(event.chunk.chunk.data)
        if self._chunk_bytes + size <= MAX_CHUNK_BYTES:
            self._chunks.append(event)
            self._chunk_bytes += size

    def add_progress(self, event: Event) -> None:
        """Only the latest of each call is kept."""
        key = event.progress.key
        self._progress.pop(key, None)
        self._progress[key] = event
        if len(self._progress) > MAX_PROGRESS:
            self._progress.popitem(last=False)

    # -- what the client says ----------------------------------------------------------------------------------------

    def ack(self, seq: int) -> list[str]:
        """Results up to seq are held by the client. Returns their keys."""
        keys = []
        while self._unacked:
            first, numbered = next(iter(self._unacked.items()))
            if first > seq:
                break
            del self._unacked[first]
            keys.append(numbered.key)
            if numbered.refusal:
                self._refused_bytes -= numbered.size
            if self._unacked_keys.get(numbered.key) == first:
                del self._unacked_keys[numbered.key]
            if not self._unsent or first < self._unsent[0].seq:
                self._sent_bytes -= numbered.size
            else:
                self._unsent.popleft()  # acknowledged over an older stream, not yet sent on this one
        return keys

    def add_window(self, add_bytes: int, most: int) -> None:
        self.window_bytes = min(most, self.window_bytes + add_bytes)

    # -- streams -----------------------------------------------------------------------------------------------------

    def attach(self, epoch: int, window_bytes: int) -> None:
        """A stream begins: control of the old one is gone, all unacknowledged results are to be sent (again)."""
        self.epoch = epoch
        self.window_bytes = window_bytes
        self.detached_at = None
        self._control.clear()
        self._chunks.clear()
        self._chunk_bytes = 0
        self._progress.clear()
        self._unsent = deque(self._unacked.values())
        self._sent_bytes = 0

    def renumber(self, results: Iterable[gateway_pb2.ServerFrame.Result]) -> None:
        """The client counts in another incarnation: give it these results, and unacknowledged ones that are not among
        them, under fresh numbers."""
        others = list(self._unacked.values())
        self._unacked.clear()
        self._unacked_keys.clear()
        self._unsent.clear()
        self._sent_bytes = 0
        given = set()
        for result in results:
            given.add(result.key)
            self.add_result(result)
        self._refused_bytes = 0
        for numbered in others:
            if numbered.key not in given:
                self._number(numbered.event.result, refusal=numbered.refusal)

    @property
    def unacked(self) -> int:
        """Results the client has not acknowledged."""
        return len(self._unacked)

    @property
    def ready(self) -> bool:
        """Something may be sent now."""
        return bool(self._control or self._chunks or self._progress or self._next_result_fits())

    def take(self, limit: int) -> list[Event]:
        """The events of the next frame: control, then results, chunks and progress, up to `limit` bytes (one event may
        be larger, and then goes alone)."""
        events: list[Event] = []
        room = limit
        while self._control and (size := self._control[0].ByteSize()) <= max(room, 0 if events else size):
            events.append(self._control.popleft())
            room -= size
        if self._control:
            return events
        while self._next_result_fits():
            numbered = self._unsent[0]
            if events and numbered.size > room:
                return events
            self._unsent.popleft()
            self._sent_bytes += numbered.size
            events.append(numbered.event)
            room -= numbered.size
        while self._chunks and (not events or self._chunks[0].ByteSize() <= room):
            event = self._chunks.popleft()
            self._chunk_bytes -= len(event.chunk.chunk.data)
            events.append(event)
            room -= event.ByteSize()
        while self._progress and room > 0:
            event = self._progress.popitem(last=False)[1]
            events.append(event)
            room -= event.ByteSize()
        return events

    def _next_result_fits(self) -> bool:
        """A result larger than the whole window is sent when nothing else is unacknowledged."""
        if not self._unsent:
            return False
        return self._sent_bytes == 0 or self._sent_bytes + self._unsent[0].size <= self.window_bytes
