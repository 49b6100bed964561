"""A real Prometheus, asked over HTTP as Grafana asks it.

Invariant: it listens on loopback alone, keeps its data in the folder it is given, and ends with its context.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
_ASK_S = 30.0


class Series(NamedTuple):
    """One line of an answer; `points` are (Unix time, value), NaN among them."""

    labels: dict[str, str]
    points: list[tuple[float, float]]

    @property
    def finite(self) -> list[tuple[float, float]]:
        return [(at, value) for at, value in self.points if math.isfinite(value)]


def prometheus_path() -> Path:
    """The server to use. Raises RuntimeError with the script's sentence where there is none."""
    script = REPOSITORY / "scripts" / "prometheus.sh"
    done = subprocess.run([script], capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return Path(done.stdout.strip())


def check_config(config: Path) -> str:
    """What promtool says of it. Raises RuntimeError where it finds fault."""
    promtool = prometheus_path().with_name("promtool")
    done = subprocess.run(
        [promtool, "check", "config", config], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode != 0:
        raise RuntimeError(f"{config}: {done.stdout}{done.stderr}".strip())
    return done.stdout


class Prometheus:
    """A server from `__enter__` to `__exit__`. `data` may hold what an earlier one stored."""

    def __init__(self, config: Path, data: Path) -> None:
        self._config = config
        self._data = data
        self._log_path = data.with_name(f"{data.name}.log")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Prometheus:
        """Returns once it answers. Raises RuntimeError with its log where it does not."""
        address = f"127.0.0.1:{_free_port()}"
        self.url = f"http://{address}"
        self._data.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    prometheus_path(),
                    f"--config.file={self._config}",
                    f"--storage.tsdb.path={self._data}",
                    f"--web.listen-address={address}",
                    "--log.level=info",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"GOMAXPROCS": "1"},
                start_new_session=True,
            )
        try:
            self._until_ready(within_s=60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def complaints(self) -> list[str]:
        """The lines of its log that are more than news."""
        return [line for line in self.log.splitlines() if "level=warn" in line or "level=error" in line]

    def _until_ready(self, within_s: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + within_s
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"Prometheus at {self.url} did not get ready:\n{self.log}") from None
            time.sleep(0.05)

    def ask(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of the HTTP API. Raises RuntimeError with the server's own words where it refuses."""
        body = urllib.parse.urlencode(parameters).encode() if parameters else None
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", data=body, timeout=_ASK_S) as page:
                return json.load(page)["data"]
        except urllib.error.HTTPError as refusal:
            raise RuntimeError(f"{path} {parameters}: {refusal.read().decode(errors='replace')}") from None

    def query_range(self, query: str, begin: float, end: float, step_s: float) -> list[Series]:
        """As a panel asks: one value per step from `begin` to `end` (Unix time)."""
        answer = self.ask("query_range", query=query, start=f"{begin:.3f}", end=f"{end:.3f}", step=f"{step_s:g}")
        return [Series(row["metric"], [(at, float(value)) for at, value in row["values"]]) for row in answer["result"]]

    def stored(self, metric: str) -> tuple[float, float]:
        """Unix times of the first and the last sample of a metric. Raises RuntimeError where there is none."""
        head = self.ask("status/tsdb")["headStats"]
        begin, end = head["minTime"] / 1000, head["maxTime"] / 1000
        times = [at for series in self.query_range(f"timestamp({metric})", begin, end, 1) for _, at in series.finite]
        if not times:
            raise RuntimeError(f"{self._data}: no sample of {metric} is stored")
        return min(times), max(times)

    @property
    def scrape_s(self) -> float:
        """The scrape interval of its configuration."""
        interval = yaml.safe_load(self.ask("status/config")["yaml"])["global"]["scrape_interval"]
        return promql_parser.parse_duration(interval).total_seconds()

    def targets(self) -> Sequence[dict[str, Any]]:
        """What it scrapes now, with `health` and `lastError`."""
        found: Sequence[dict[str, Any]] = self.ask("targets")["activeTargets"]
        return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
