"""Reads what a run tells while it runs: the trainer's feed, and the metrics of the nodes.

Invariants: a line is taken once and only when it is whole; a node that does not answer costs a look, never the run.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from node_runtime.tls_files import trust

_READ_BYTES = 1 << 20
_SCRAPE_S = 2.0

Sample = tuple[str, Mapping[str, str], float]


class Feed:
    """The events of a file of JSON lines that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""

    def new_events(self) -> list[dict[str, Any]]:
        """Since the last call; at most a megabyte at a time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(_READ_BYTES)
        except OSError:
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
        return events


def scrape(url: str, ca_file: Path | None = None) -> list[Sample]:
    """All samples of a /metrics page; none where it cannot be had. Blocks for at most two seconds.

    `ca_file`: the authority that an https page is checked with.
    """
    try:
        context = trust(ca_file) if url.startswith("https:") else None
        with urllib.request.urlopen(url, timeout=_SCRAPE_S, context=context) as page:
            text = page.read().decode("utf-8", "replace")
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
    except (OSError, ValueError, urllib.error.URLError):
        return []


def total(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """The sum over the samples of this name that have these labels."""
    return sum(
        value for found, has, value in samples if found == name and all(has.get(k) == v for k, v in labels.items())
    )
