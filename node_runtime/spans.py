"""The span record: one line of JSON per stretch of time in a trajectory's life.

Invariant: a line is whole or is not read; readers know version 1 and ignore fields they do not know. Times are Unix
seconds of the writing machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from node_runtime.errors import EXIT_USAGE, NodeError
from node_runtime.logs import get_logger

VERSION: Final = 1
FLUSH_EVERY_S: Final = 1.0
# Lines held before record() itself writes: the bound of the buffer.
MAX_BUFFERED: Final = 4096

log = get_logger("node_runtime.spans")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What happened between `start` and `end`. `kind`: queue, generate, tool-queue, tool-run, transfer, weight-sync,
    reward, train, ... Fields that do not apply keep their defaults and are not written."""

    kind: str
    node: str
    start: float
    end: float
    trajectory: str = ""
    generation: int | None = None
    turn: int | None = None
    tool: str = ""
    call_key: str = ""
    outcome: str = ""
    attempt: int | None = None
    tokens: int | None = None
    weight_version: int | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> str:
        pairs: dict[str, Any] = {"version": self.version}
        for item in _FIELDS:
            value = getattr(self, item)
            if value is not None and value != "" and value != {}:
                pairs[item] = dict(value) if item == "attributes" else value
        return json.dumps(pairs, ensure_ascii=False, separators=(",", ":"), default=str)

    @classmethod
    def from_mapping(cls, pairs: Mapping[str, Any]) -> Self:
        return cls(**{name: value for name, value in pairs.items() if name in _NAMES})


_FIELDS: Final = tuple(item.name for item in dataclasses.fields(Span) if item.name != "version")
_NAMES: Final = frozenset((*_FIELDS, "version"))


class SpanWriter:
    """Writes spans of one node to `spans-<node>.jsonl`; without a folder it does nothing.

    record() never blocks on more than one write of buffered lines. A disk that fails costs spans, never the run: it is
    logged once and what was lost is counted in `lost`.
    """

    def __init__(self, folder: Path | None, node: str) -> None:
        self.node = node
        self.lost = 0
        self._buffer: list[str] = []
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._closed = threading.Event()
        self._file: int | None = None
        self._thread: threading.Thread | None = None
        if folder is None:
            return
        name = re.sub(r"[^A-Za-z0-9._-]", "_", node) or "node"
        self.path = folder / f"spans-{name}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._end_torn_line(self._file)
        except OSError as error:
            raise NodeError(
                f"runtime.spans_dir: {self.path} cannot be written: {error.strerror or error}", EXIT_USAGE
            ) from None
        self._thread = threading.Thread(target=self._flush_often, name="spans", daemon=True)
        self._thread.start()

    @staticmethod
    def _end_torn_line(file: int) -> None:
        """A killed predecessor may have left half a line: keep ours off it."""
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")

    def record(self, span: Span) -> None:
        if self._file is None:
            return
        line = span.to_json()
        with self._lock:
            self._buffer.append(line)
            full = len(self._buffer) >= MAX_BUFFERED
        if full:
            self.flush()

    def flush(self) -> None:
        """Writes what is buffered."""
        with self._write_lock:
            with self._lock:
                lines, self._buffer = self._buffer, []
            if not lines or self._file is None:
                return
            data = memoryview(("\n".join(lines) + "\n").encode("utf-8", "replace"))
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:
                if self.lost == 0:
                    log.error(f"{self.path} cannot be written ({error.strerror or error}): spans are lost from here on")
                self.lost += len(lines)

    def _flush_often(self) -> None:
        while not self._closed.wait(FLUSH_EVERY_S):
            self.flush()

    def close(self) -> None:
        """Flushes and closes; may be called again."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None
        self.flush()
        with self._write_lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def read_spans(folder: Path) -> Iterator[Span]:
    """All spans of a run's folder, file by file. Torn lines (a killed writer) are skipped.

    Raises NodeError (EXIT_USAGE) for spans of a later version, which this one would misread.
    """
    for path in sorted(folder.glob("spans-*.jsonl")):
        with path.open("r", encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                span = _parse(line, path, number)
                if span is not None:
                    yield span


def _parse(line: str, path: Path, number: int) -> Span | None:
    try:
        pairs = json.loads(line)
    except ValueError:
        if line.strip():
            log.warning(f"{path}:{number}: is half a line, left by a writer that was killed; skipped")
        return None
    if isinstance(pairs, dict) and isinstance(pairs.get("version"), int) and pairs["version"] > VERSION:
        raise NodeError(
            f"{path}:{number}: is a span of version {pairs['version']}, this program reads up to {VERSION}: "
            "read it with a newer one",
            EXIT_USAGE,
        )
    try:
        return Span.from_mapping(pairs)
    except (TypeError, AttributeError):
        log.warning(f"{path}:{number}: is no span (kind, node, start and end are needed); skipped")
        return None
