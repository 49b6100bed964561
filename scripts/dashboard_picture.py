"""Draws the dashboard's panels from what a real Prometheus answers to their own queries.

    python scripts/dashboard_picture.py [--run] RUN_DIR PICTURE [-- further flags of fermata demo]

With --run the demo is run first, under a Prometheus that keeps its data in RUN_DIR/prometheus; without it, what such a
run has stored is drawn again. Titles, units, legends and queries are those of the JSON, so a panel that would be empty
in Grafana is empty here.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from fermata_cli.report.canvas import INK, new_figure, save
from tests.support.dashboard import Dashboard, Panel
from tests.support.prometheus import Prometheus

COLOURS = ("#2c6fbb", "#d1495b", "#5b8c5a", "#e09f3e", "#8e5572", "#3a9d9d", "#8f8f8f", "#a0522d", "#6a5acd")
GREY = "#bbbbbb"
WIDTH = 12.0  # inches
LETTERS = 230  # of a legend's size that stand side by side over the whole width
MOST_NAMED = 6  # lines of a legend
FEW = 8  # points that are marked, as a short line is easily overlooked
LEAD_S = 5.0  # shown before the trainer's first sample
Line = tuple[str, list[tuple[float, float]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="run the demo first")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("flags", nargs="*", help="after --: handed to fermata demo")
    options = parser.parse_args()
    config, data = options.run_dir / "prometheus.yml", options.run_dir / "prometheus"
    if options.run:
        code = run_demo(options.run_dir, options.flags)
        if code != 0:
            return code
    elif not data.is_dir():
        parser.error(f"{data}: there is nothing stored of this run: use --run")
    with Prometheus(config, data) as prometheus:
        drawn = draw(prometheus, options.picture, where=options.run_dir.name)
    print(f"{options.picture}: {drawn} panels, from the answers to the dashboard's own queries", file=sys.stderr)
    return 0


def run_demo(run_dir: Path, flags: Sequence[str]) -> int:
    """`fermata demo` to its end, scraped from the moment its run folder says what to scrape. Its exit code."""
    config = run_dir / "prometheus.yml"
    before = config.stat().st_mtime_ns if config.exists() else None
    command = ["fermata", "demo", "--runs", str(run_dir.parent), "--name", run_dir.name, *flags]
    print(shlex.join(command), file=sys.stderr)
    with subprocess.Popen([sys.executable, "-m", "fermata_cli", *command[1:]], stdout=subprocess.DEVNULL) as demo:
        while not config.exists() or config.stat().st_mtime_ns == before:
            if demo.poll() is not None:
                return demo.returncode or 1
            time.sleep(0.1)
        with Prometheus(config, run_dir / "prometheus"):
            return demo.wait()


def draw(prometheus: Prometheus, picture: Path, *, where: str) -> int:
    """All panels that have something to show, as rows of a page; how many."""
    board = Dashboard()
    scrape_s = prometheus.scrape_s
    begin, end = prometheus.stored("fermata_trainer_steps_total")
    begin, end = begin - LEAD_S, end + scrape_s

    def lines(panel: Panel) -> list[Line]:
        found = []
        for target in panel.targets:
            query = board.fill(target.expr, scrape_s=scrape_s, step_s=scrape_s)
            for series in prometheus.query_range(query, begin, end, scrape_s):
                if series.finite:
                    found.append((target.named(series.labels), [(at - begin, value) for at, value in series.finite]))
        return found

    answers = [(panel, lines(panel)) for panel in board.panels]
    empty = [panel.title for panel, found in answers if not found]
    shown = [(panel, found) for panel, found in answers if found]
    caption = (
        f"{board.json['title']}, run “{where}”: drawn with matplotlib from what a real Prometheus answered to the "
        f"dashboard's own queries, scraping every {scrape_s:g} s. This is not a screenshot of Grafana."
    )
    if empty:
        caption += f"\nEmpty in this run, and left out: {', '.join(empty)}."
    _draw_page(shown, caption, end - begin, picture)
    with Image.open(picture) as drawn:  # few colours are a third of the bytes
        few = drawn.convert("RGB").quantize(128)
    few.save(picture, optimize=True)
    return len(shown)


def _draw_page(shown: Sequence[tuple[Panel, list[Line]]], caption: str, length_s: float, picture: Path) -> None:
    """Lines of panels as they stand on the dashboard, the title of a row above its first."""
    lines = [list(panels) for _, panels in groupby(shown, key=lambda pair: pair[0].json["gridPos"]["y"])]
    begins = [not at or line[0][0].row != lines[at - 1][0][0].row for at, line in enumerate(lines)]
    heights = [
        (1.0 if line[0][0].json["type"] == "stat" else 2.4) + 0.3 * first
        for line, first in zip(lines, begins, strict=True)
    ]
    figure, axes = new_figure(WIDTH, 0.5 + sum(heights))
    axes.remove()
    figure.suptitle(caption, fontsize=8, x=0.01, ha="left", color=INK["text"])
    parts = figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, line, first in zip(parts, lines, begins, strict=True):
        if first:
            part.suptitle(line[0][0].row, fontsize=12, fontweight="bold", x=0.01, ha="left", color=INK["text"])
        for axes, (panel, found) in zip(part.subplots(1, len(line), squeeze=False)[0], line, strict=True):
            if panel.json["type"] == "stat":
                _draw_stat(axes, panel, found)
            else:
                _draw_series(axes, panel, found, length_s, wide=LETTERS // len(line))
    save(figure, picture)


def _draw_stat(axes: Any, panel: Panel, found: list[Line]) -> None:
    """The last value, large, over the course of it."""
    ((_, points),) = found
    axes.plot(*zip(*points, strict=True), color=COLOURS[0], alpha=0.35, linewidth=1)
    axes.fill_between(*zip(*points, strict=True), color=COLOURS[0], alpha=0.1)
    axes.text(0.5, 0.5, _format(panel)(points[-1][1]), transform=axes.transAxes, ha="center", va="center", fontsize=16)
    axes.set_title(panel.title, fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_series(axes: Any, panel: Panel, found: list[Line], length_s: float, *, wide: int) -> None:
    """`wide`: letters of a legend that stand side by side."""
    defaults = panel.json["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    lines = sorted(found, key=lambda line: -max(value for _, value in line[1]))
    stacked = custom["stacking"]["mode"] == "normal"
    named = lines if stacked or len(lines) <= MOST_NAMED else lines[: MOST_NAMED - 1]
    rest = lines[len(named) :]
    colours = _colours(panel, [name for name, _ in named])
    if stacked:
        moments = sorted({at for _, points in lines for at, _ in points})
        values = [[dict(points).get(at, 0.0) for at in moments] for _, points in lines]
        axes.stackplot(moments, values, labels=[name for name, _ in named], colors=colours, alpha=0.75)
    else:
        style = {
            "drawstyle": "steps-post" if custom["lineInterpolation"] == "stepAfter" else "default",
            "linewidth": 1.1,
        }
        for _, points in rest:
            axes.plot(*zip(*points, strict=True), color=GREY, **style)
        # What is largest is named first and drawn last, so that it is not covered.
        for (name, points), colour in reversed(list(zip(named, colours, strict=True))):
            marker = "." if len(points) < FEW else ""
            axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, **style)
    if rest:
        most = max(value for _, points in rest for _, value in points)
        axes.plot([], [], color=GREY, label=f"{len(rest)} more, {_format(panel)(most)} at most")
    top = 1.04 * defaults.get("max", _highest(axes) or 1.0)
    axes.set_ylim(-0.03 * top if "min" in defaults else axes.get_ylim()[0], top)  # a line at 0 is to be seen
    axes.set_xlim(0, length_s)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=defaults.get("decimals") == 0))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _format(panel)(value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{int(value) // 60}:{int(value) % 60:02d}"))
    axes.tick_params(labelsize=6.5)
    axes.grid(alpha=0.25)
    axes.set_title(panel.title, fontsize=9, loc="left")
    if panel.unit.startswith("count:"):
        axes.set_title(panel.unit.removeprefix("count:"), fontsize=7, loc="right")
    handles, names = axes.get_legend_handles_labels()
    if not stacked:
        handles, names = _as_named(handles, names, named)
    columns = max(1, min(len(names), 4, wide // (max(map(len, names)) + 5)))
    axes.legend(handles, names, fontsize=6, ncol=columns, frameon=False,
                loc="upper center", bbox_to_anchor=(0.5, -0.1), columnspacing=1, handlelength=1.2)  # fmt: skip


def _highest(axes: Any) -> float:
    drawn = [float(value) for line in axes.lines for value in line.get_ydata()]
    return max(drawn) if drawn else float(axes.get_ylim()[1])


def _as_named(handles: list[Any], names: list[str], named: Sequence[Line]) -> tuple[list[Any], list[str]]:
    """Lines were drawn from the smallest; the legend begins with the largest."""
    count = len(named)
    return handles[:count][::-1] + handles[count:], names[:count][::-1] + names[count:]


def _colours(panel: Panel, names: Sequence[str]) -> list[str]:
    """Those the dashboard sets for a name, else one after another."""
    fixed = {
        override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
        for override in panel.json["fieldConfig"]["overrides"]
    }
    return [fixed.get(name, COLOURS[number % len(COLOURS)]) for number, name in enumerate(names)]


def _format(panel: Panel) -> Callable[[float], str]:
    """As Grafana writes values of this unit, as far as the dashboard uses them."""
    unit = panel.unit
    if unit == "s":
        return lambda value: f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1000:.3g} ms"
    if unit == "percentunit":
        return lambda value: f"{100 * value:.3g}%"
    if unit == "watt":
        return lambda value: f"{value:.3g} W"
    return lambda value: f"{value / 1000:.3g} K" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
