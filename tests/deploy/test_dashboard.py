"""The dashboard against the code: every query parses, and asks for metrics and labels that the processes have."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from types import ModuleType
from typing import Any

import promql_parser
import pytest
from fermata.v1 import tool_pb2
from prometheus_client.metrics import MetricWrapperBase

import rollout_node.metrics
import rollout_node.weights.metrics
import tool_gateway.metrics
import trainer_node.metrics
from node_runtime.gpu_metrics import GpuMetrics
from node_runtime.outcomes import fault_name
from tests.support.dashboard import Dashboard, Panel, Target

BOARD = Dashboard()
MODULES = (tool_gateway.metrics, rollout_node.metrics, rollout_node.weights.metrics, trainer_node.metrics)
OF_TARGETS = {"namespace", "instance"}  # Prometheus itself gives these to what it scrapes
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
LIFETIME = ("_total", "_bucket", "_sum", "_count")  # these only grow
UNITS = re.compile(r"s|none|percentunit|bytes|watt|count:[a-z]+/s")
each_panel = pytest.mark.parametrize("panel", BOARD.panels, ids=lambda panel: f"{panel.row}/{panel.title}")
each_target = pytest.mark.parametrize("target", BOARD.targets, ids=lambda target: target.name)


def samples(module: ModuleType) -> dict[str, set[str]]:
    """Labels by name of what a metrics module shows."""
    found: dict[str, set[str]] = {}
    for metric in vars(module).values():
        if isinstance(metric, MetricWrapperBase):
            for suffix in SUFFIXES[metric._type]:
                found[metric._name + suffix] = {*metric._labelnames, *(("le",) if suffix == "_bucket" else ())}
        elif isinstance(metric, GpuMetrics):
            found |= {family.name: set(family._labelnames) for family in metric.describe()}
    return found


KNOWN = {name: labels for module in MODULES for name, labels in samples(module).items()}


def parsed(expr: str) -> promql_parser.Expr:
    return promql_parser.parse(BOARD.fill(expr, scrape_s=15, step_s=15))


def selectors(expr: promql_parser.Expr) -> list[promql_parser.VectorSelector]:
    found: list[Any] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(expr, visit)
    return found


def result_labels(expr: promql_parser.Expr) -> set[str]:
    """The labels that the answer's series have. Fails where an aggregation asks for one that is not there."""
    match expr:
        case promql_parser.VectorSelector():
            return KNOWN[expr.name] | OF_TARGETS
        case promql_parser.MatrixSelector():
            return result_labels(expr.vector_selector)
        case promql_parser.ParenExpr():
            return result_labels(expr.expr)
        case promql_parser.AggregateExpr():
            kept = set(expr.modifier.labels) if expr.modifier is not None else set()
            assert kept <= result_labels(expr.expr), f"{kept - result_labels(expr.expr)} is no label of {expr.expr}"
            return kept
        case promql_parser.BinaryExpr():
            return result_labels(expr.lhs)
        case promql_parser.Call():
            inner = [result_labels(argument) for argument in expr.args]
            return set().union(*inner) - ({"le"} if expr.func.name == "histogram_quantile" else set())
        case promql_parser.NumberLiteral():
            return set()
    raise AssertionError(f"{type(expr).__name__} is not expected on the dashboard: {expr}")


def unrated(expr: promql_parser.Expr) -> list[str]:
    """What only grows and is not under a rate() or increase()."""
    match expr:
        case promql_parser.Call() if expr.func.name in ("rate", "increase"):
            return []
        case promql_parser.VectorSelector():
            return [expr.name] if expr.name.endswith(LIFETIME) else []
        case promql_parser.BinaryExpr():
            return unrated(expr.lhs) + unrated(expr.rhs)
        case promql_parser.ParenExpr() | promql_parser.AggregateExpr():
            return unrated(expr.expr)
        case promql_parser.Call():
            return [name for argument in expr.args for name in unrated(argument)]
    return []


def test_the_dashboard_is_one_that_grafana_takes_in() -> None:
    board = BOARD.json
    assert board["uid"] == "fermata"
    assert board["id"] is None, "an id is the database's: a dashboard that is provisioned has none"
    assert board["schemaVersion"] >= 36
    assert {"fermata"} <= set(board["tags"])
    assert board["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert len(BOARD.panels) >= 24


def test_no_panel_covers_another_and_none_leaves_the_grid() -> None:
    covered: Counter[tuple[int, int]] = Counter()
    for panel in BOARD.json["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24, panel["title"]
        covered.update(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
    assert max(covered.values()) == 1


@each_panel
def test_a_panel_says_what_it_shows_and_how_to_read_it(panel: Panel) -> None:
    assert panel.title
    description = panel.json["description"]
    assert re.fullmatch(r"[A-Z0-9].{40,}\.", description), "one sentence"
    assert not re.search(r"[.!?] [A-Z]", description), "one sentence"
    assert UNITS.fullmatch(panel.unit), panel.unit
    assert panel.json["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel.targets
    references = [target.json["refId"] for target in panel.targets]
    assert len(set(references)) == len(references)
    if panel.json["type"] == "timeseries":
        assert panel.json["options"]["legend"]["showLegend"]


@each_target
def test_a_query_asks_for_what_the_processes_show(target: Target) -> None:
    assert target.json["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    tree = parsed(target.expr)
    found = selectors(tree)
    assert found
    for selector in found:
        assert selector.name in KNOWN, f"no process shows {selector.name}"
        matchers = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
        assert matchers.keys() <= KNOWN[selector.name] | OF_TARGETS
        assert matchers["namespace"] == ".*", "every query is narrowed by the variable"
        assert ("tool" in matchers) is ("tool" in KNOWN[selector.name] and target.panel.row != "At a glance")
        assert matchers.get("fault") in (None, *(fault_name(fault) for fault in tool_pb2.Fault.values()))
    shown = set(re.findall(r"\{\{(\w+)\}\}", target.legend))
    assert target.legend
    assert shown <= result_labels(tree), "the legend names a label that the answer has not"


@each_target
def test_rates_are_taken_over_grafanas_interval_and_lifetime_sums_are_not_divided(target: Target) -> None:
    assert set(re.findall(r"\[(.*?)\]", target.expr)) <= {"$__rate_interval"}
    assert target.expr.count("rate(") == target.expr.count("[$__rate_interval]")
    tree = parsed(target.expr)
    if isinstance(tree, promql_parser.BinaryExpr):
        assert unrated(tree) == []
    if target.panel.unit.startswith("count:"):
        assert unrated(tree) == [], "a rate is shown, not how much it was since the process started"


def test_the_variables_work_where_targets_carry_no_such_label() -> None:
    variables = BOARD.variables
    assert variables.keys() == {"datasource", "namespace", "tool"}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    for name in ("namespace", "tool"):
        variable = variables[name]
        assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert (variable["includeAll"], variable["allValue"]) == (True, ".*"), "a label that is absent matches .*"
        assert variable["current"]["value"] == ["$__all"]
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert asked is not None
        (selector,) = selectors(parsed(asked[1]))
        assert asked[2] in KNOWN[selector.name] | OF_TARGETS
        assert variable["definition"] == variable["query"]["query"]


def test_grafanas_interval_is_four_scrapes_or_a_step_and_one() -> None:
    rate = 'rate(x_total{namespace=~"$namespace"}[$__rate_interval])'
    assert BOARD.fill(rate, scrape_s=15, step_s=15) == 'rate(x_total{namespace=~".*"}[60000ms])'
    assert BOARD.fill(rate, scrape_s=2, step_s=30) == 'rate(x_total{namespace=~".*"}[32000ms])'
    assert BOARD.fill("${tool}", scrape_s=2, step_s=30) == ".*"
    with pytest.raises(KeyError, match="unheard_of"):
        BOARD.fill("$unheard_of", scrape_s=2, step_s=30)
