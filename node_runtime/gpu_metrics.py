"""The GPUs of this process among its metrics: utilisation, memory and power, asked of NVML when somebody scrapes.

Invariant: a scrape waits for NVML no longer than its bound and never fails of it, whatever NVML does; what was not
measured is absent, never 0. At most one thread asks NVML at a time, so a call that hangs holds one thread and no more.

An answer serves all scrapes of the next second: the driver itself takes samples of the utilisation over up to a second.
NVML starts with the first scrape; what processes this one starts then are spawned, not forked, and share nothing of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import prometheus_client
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from node_runtime.gpu_nvml import NvmlReader, Reading
from node_runtime.logs import get_logger

FRESH_S: Final = 1.0  # so old an answer is given again
WAIT_S: Final = 1.0  # so long a scrape waits, from the question on; who scrapes every 2 s waits no longer than that
STALE_S: Final = 5.0  # so old an answer stands in for one that is late
_CLOSE_S: Final = 1.0

_LABELS: Final = ("gpu", "model")
_MEANINGS: Final = {
    "utilization_ratio": "Share of the last sample period (1 s or less) in which the GPU ran a kernel",
    "memory_used_bytes": "Memory of the GPU in use, by any process, with what its driver reserves",
    "memory_total_bytes": "Memory of the GPU",
    "power_watts": "Power that the GPU draws",
}

log = get_logger("node_runtime.gpu_metrics")


class Source(Protocol):
    """What answers, in a thread of its own; it may hang."""

    def read(self) -> tuple[Reading, ...]: ...

    def close(self) -> None: ...


class GpuMetrics(Collector):
    """`<prefix>_gpu_…` of the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, by CUDA's number and model.

    Made once per process beside its other metrics; shown from `start` to `stop`.
    """

    def __init__(
        self, prefix: str, *, registry: CollectorRegistry = prometheus_client.REGISTRY, wait_s: float = WAIT_S
    ) -> None:
        self._prefix = prefix
        self._registry = registry
        self._wait_s = wait_s
        self._readings: LatestReadings | None = None

    def start(self) -> None:
        """From now on they are on the page. NVML is not touched before the first scrape."""
        # As CUDA does, which reads its variables once: an engine may set them for its workers later.
        self._readings = LatestReadings(NvmlReader(dict(os.environ)), wait_s=self._wait_s)
        self._registry.register(self)

    def stop(self) -> None:
        """Takes them off the page and lets go of NVML; without effect where they were not started."""
        readings, self._readings = self._readings, None
        if readings is not None:
            self._registry.unregister(self)
            readings.close()

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The families without a sample. With it, registering them asks NVML nothing."""
        for name, meaning in _MEANINGS.items():
            yield GaugeMetricFamily(f"{self._prefix}_gpu_{name}", meaning, labels=_LABELS)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The families that have a sample now."""
        readings = self._readings.get() if self._readings is not None else ()
        for name, family in zip(_MEANINGS, self.describe(), strict=True):
            for reading in readings:
                value = getattr(reading, name)
                if value is not None:
                    family.add_metric((reading.gpu, reading.model), value)
            if family.samples:
                yield family


class LatestReadings:
    """The newest answer of a source, for many threads that wait no longer than `wait_s`."""

    def __init__(
        self,
        source: Source,
        *,
        fresh_s: float = FRESH_S,
        wait_s: float = WAIT_S,
        stale_s: float = STALE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._fresh_s = fresh_s
        self._wait_s = wait_s
        self._stale_s = stale_s
        self._clock = clock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._asked_at: float | None = None  # the question that is open
        self._late = False  # it is, and that was told
        self._answer: tuple[Reading, ...] = ()
        self._answered_at = float("-inf")
        self._closed = False

    def get(self) -> tuple[Reading, ...]:
        """What is newest, no older than `stale_s`; nothing where there is no such answer."""
        with self._changed:
            if self._clock() - self._answered_at >= self._fresh_s:
                self._ask_and_wait()
            return self._answer if self._clock() - self._answered_at < self._stale_s else ()

    def close(self) -> None:
        """No further answers. A source that hangs is left to its thread, which ends with the process at the latest."""
        with self._changed:
            self._closed = True
            self._answered_at = float("-inf")
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _ask_and_wait(self) -> None:
        if self._closed:
            return
        if self._asked_at is None:
            self._asked_at = self._clock()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpu-metrics", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        left = self._asked_at + self._wait_s - self._clock()  # none, for whoever comes after a first one waited it out
        answered = self._changed.wait_for(lambda: self._asked_at is None or self._closed, timeout=max(0.0, left))
        if not answered and not self._late:
            self._late = True
            log.warning(f"NVML has not answered for {self._wait_s:g} s: GPU metrics are left out until it does")

    def _run(self) -> None:
        try:
            while self._wait_for_question():
                self._take(self._source.read())
            self._source.close()
        except Exception as error:
            log.error("GPU metrics ended: this is a fault of the program, nothing else is disturbed", exc_info=error)
            with self._changed:
                self._closed = True
                self._asked_at = None
                self._changed.notify_all()

    def _wait_for_question(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._asked_at is not None or self._closed)
            return not self._closed

    def _take(self, answer: tuple[Reading, ...]) -> None:
        with self._changed:
            if self._late:
                log.info("NVML answers again", after_s=round(self._clock() - (self._asked_at or 0.0), 1))
                self._late = False
            self._answer = answer
            self._answered_at = self._clock() if not self._closed else float("-inf")
            self._asked_at = None
            self._changed.notify_all()
