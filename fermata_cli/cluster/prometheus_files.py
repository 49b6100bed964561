"""What a Prometheus needs to watch a local cluster: `prometheus --config.file=runs/demo/prometheus.yml`.

Invariant: targets.json lists the processes that are up, no others; Prometheus reads it anew whenever it changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import yaml

from fermata_cli.cluster.plan import Role
from fermata_cli.report.files import write_json
from node_runtime.runtime_settings import RuntimeSettings

# Short, as runs on one machine are: a minute should be enough to see something.
SCRAPE_S: Final = 2
_TARGETS: Final = "targets.json"
_JOBS: Final = {
    Role.BACKEND: "fermata-tools",
    Role.GATEWAY: "fermata-gateway",
    Role.ROLLOUT: "fermata-rollout",
    Role.TRAINER: "fermata-trainer",
}


def write_config(run_dir: Path, runtime: RuntimeSettings) -> None:
    """prometheus.yml, before any process is up."""
    scrape: dict[str, Any] = {
        "job_name": "fermata",
        "scheme": "https" if runtime.metrics_tls else "http",
        "file_sd_configs": [{"files": [_TARGETS], "refresh_interval": "5s"}],
    }
    if runtime.metrics_tls and runtime.tls.ca_file is not None:
        scrape["tls_config"] = {"ca_file": str(runtime.tls.ca_file.resolve())}
    whole = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [scrape]}
    write_targets(run_dir, ())
    (run_dir / "prometheus.yml").write_text(yaml.safe_dump(whole, sort_keys=False), encoding="utf-8")


def write_targets(run_dir: Path, up: Iterable[tuple[Role, str, str]]) -> None:
    """`up`: role, name and host:port of the metrics of each process."""
    write_json(
        run_dir / _TARGETS,
        [{"targets": [address], "labels": {"job": _JOBS[role], "node": name}} for role, name, address in up],
    )
