"""The metrics reference, from the metrics as the processes register them.

Invariant: every metric of ours that a process can show stands in it once, under the process that shows it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.metrics import MetricWrapperBase

from fermata_cli.reference.tables import code, table
from node_runtime.gpu_metrics import GpuMetrics

INTRO = """\
# Metrics

<!-- Made by `fermata config reference --metrics`; a test compares. Change the texts beside the metrics instead. -->

Every process serves its metrics, in Prometheus' form, at `/metrics` of the address that `runtime.metrics_host` and
`runtime.metrics_port` [name](settings.md#runtime); they are off without a port, and a port of 0 takes a free one, which
the process's ready line tells. `/startupz`, `/healthz` and `/readyz` stand beside it ([deploy](deploy.md#probes)).

Labels hold names of tools and pools, states, and [outcomes and faults](trajectory.md#outcomes), never ids. Names ending
in `_seconds` are in seconds, `_bytes` in bytes, `_ratio` from 0 to 1. A histogram `x` is stored as `x_bucket`, `x_sum`
and `x_count`. GPU metrics are there where a GPU is. Beside them stand `python_…` and `process_…` of the Python client.
"""

# The modules that make the metrics of each process, in the order of the page. They import neither torch nor vLLM.
PROCESSES: Final[Mapping[str, tuple[str, ...]]] = {
    "Tool gateway": ("tool_gateway.metrics",),
    "Tool backend": ("tool_backend.metrics",),
    "Rollout node": ("rollout_node.metrics", "rollout_node.weights.metrics"),
    "Trainer": ("trainer_node.metrics",),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One metric, by the name a query uses (without the endings of a histogram)."""

    process: str
    name: str
    type: str
    labels: tuple[str, ...]
    meaning: str


def measured() -> list[Measured]:
    """All metrics of all processes."""
    return [
        metric for process, modules in PROCESSES.items() for module in modules for metric in _of_module(process, module)
    ]


def as_markdown() -> str:
    """The page docs/metrics.md."""
    lines = [INTRO]
    found = measured()
    for process in PROCESSES:
        rows = [
            (code(m.name), m.type, ", ".join(map(code, m.labels)), m.meaning) for m in found if m.process == process
        ]
        lines += [f"## {process}", "", *table(("metric", "type", "labels", "meaning"), rows), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def as_data() -> list[dict[str, Any]]:
    """The same for programs."""
    return [
        {"process": m.process, "name": m.name, "type": m.type, "labels": list(m.labels), "meaning": m.meaning}
        for m in measured()
    ]


def _of_module(process: str, module: str) -> Iterator[Measured]:
    found = vars(importlib.import_module(module)).values()
    for collector in dict.fromkeys(v for v in found if isinstance(v, MetricWrapperBase | GpuMetrics)):
        for family in collector.describe():
            name = family.name + ("_total" if family.type == "counter" else "")
            # The families of prometheus_client's own metrics do not know their labels, those of a collector of ours do.
            labels = (collector if isinstance(collector, MetricWrapperBase) else family)._labelnames
            yield Measured(process, name, family.type, tuple(labels), family.documentation.rstrip("."))
