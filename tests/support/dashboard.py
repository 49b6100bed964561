"""The Grafana dashboard of the chart as data, and its queries as Grafana would send them.

Invariant: titles, units and queries come from the JSON alone; only the variables Grafana fills in are filled in here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
DASHBOARD = REPOSITORY / "deploy/helm/fermata/dashboards/fermata.json"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclasses.dataclass(frozen=True)
class Target:
    """One query of a panel."""

    panel: Panel
    json: Mapping[str, Any]

    @property
    def expr(self) -> str:
        return str(self.json["expr"])

    @property
    def legend(self) -> str:
        return str(self.json["legendFormat"])

    @property
    def name(self) -> str:
        return f"{self.panel.row} / {self.panel.title} / {self.json['refId']}"

    def named(self, labels: Mapping[str, str]) -> str:
        """The legend of the series with these labels."""
        return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), self.legend)


@dataclasses.dataclass(frozen=True)
class Panel:
    """What is drawn in one place; `row` is the title of the row above it."""

    row: str
    json: Mapping[str, Any]

    @property
    def title(self) -> str:
        return str(self.json["title"])

    @property
    def unit(self) -> str:
        return str(self.json["fieldConfig"]["defaults"]["unit"])

    @cached_property
    def targets(self) -> list[Target]:
        return [Target(self, target) for target in self.json["targets"]]


class Dashboard:
    """Raises KeyError and json.JSONDecodeError where the file is no dashboard."""

    def __init__(self, path: Path = DASHBOARD) -> None:
        self.json: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        self.panels: list[Panel] = []
        row = ""
        for panel in self.json["panels"]:
            if panel["type"] == "row":
                row = panel["title"]
            else:
                self.panels.append(Panel(row, panel))

    @property
    def targets(self) -> list[Target]:
        return [target for panel in self.panels for target in panel.targets]

    @property
    def variables(self) -> dict[str, dict[str, Any]]:
        return {variable["name"]: variable for variable in self.json["templating"]["list"]}

    def fill(self, expr: str, *, scrape_s: float, step_s: float) -> str:
        """The query that Grafana sends while every variable stands at All. Raises KeyError for a variable unknown here.

        $__rate_interval is the larger of the step plus one scrape interval and of four scrape intervals:
        https://grafana.com/docs/grafana/latest/datasources/prometheus/template-variables/
        """
        values = {"__rate_interval": f"{round(1000 * max(step_s + scrape_s, 4 * scrape_s))}ms"}
        values |= {
            name: variable["allValue"] for name, variable in self.variables.items() if variable["type"] == "query"
        }
        return _VARIABLE.sub(lambda found: values[found[1] or found[2]], expr)
