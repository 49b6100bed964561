"""The notebooks' pictures: one vocabulary of colours, and functions that give an image to show.

Invariant: what is drawn is what was passed in; no figure is made up here but in `schematic`, which says so.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fermata_cli.report.canvas import INK, new_figure
from IPython.display import Image
from matplotlib.patches import Patch, Rectangle
from node_runtime.segments import MODEL, PROMPT, TOOL
from trainer_node.trajectory import Trajectory

from records import Record

COLOUR = {"generate": INK["generate"], "tool": "#b9b9b9", "others": "#eb9b34"}
WORDS = {"generate": "generating", "tool": "its tool runs", "others": "has its answer, waits for the tools of others"}
_HELD = INK["slow"]
_DPI = 120


def schematic(tool_seconds: Sequence[Sequence[float]]) -> Image:
    """Two ways to run the same trajectories, not to scale. `tool_seconds`: of each trajectory's calls, in turn."""
    figure, both = new_figure(10.0, 0.42 * len(tool_seconds) + 1.15, ncols=2, sharey=True, sharex=True)
    turns = len(tool_seconds[0]) + 1
    for axes, barrier, title in zip(both, (True, False), ("lock-step turns", "in-loop"), strict=True):
        free = [0.0] * len(tool_seconds)  # when each can go on
        for turn in range(turns):
            if barrier:
                for row, ready in enumerate(free):
                    _bar(axes, row, ready, max(free), "others")
                free = [max(free)] * len(free)
                if turn:
                    axes.axvline(free[0], color=INK["text"], linewidth=0.8, linestyle=":")
            for row, tools in enumerate(tool_seconds):
                _bar(axes, row, free[row], free[row] + 1, "generate")
                free[row] += 1
                if turn < turns - 1:
                    _bar(axes, row, free[row], free[row] + tools[turn], "tool")
                    free[row] += tools[turn]
        for row, end in enumerate(free):
            axes.text(end + 0.15, row, "done", va="center", fontsize=8, color=INK["text"])
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("time →", loc="left")
        axes.set_xticks([])
        axes.set_yticks(range(len(free)), [f"trajectory {row + 1}" for row in range(len(free))], fontsize=8)
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    both[0].invert_yaxis()
    both[0].set_xlim(0, sum(max(calls) for calls in zip(*tool_seconds, strict=True)) + turns + 1.2)
    _legend(figure)
    return _image(figure)


def lanes(record: Record, held: str) -> Image:
    """A row for each trajectory: `held` on top, in the stretch of time in which the others were under way."""
    others = {name: rows for name, rows in record.stretches.items() if name != held}
    ends = {name: max(end for _, _, end in rows) for name, rows in others.items()}
    first, last = min(start for rows in others.values() for _, start, _ in rows), max(ends.values())
    mine = record.stretches[held]
    longest = max((row for row in mine if row[0] == "tool"), key=lambda row: row[2] - row[1])
    figure, axes = new_figure(10.0, 0.14 * (len(others) + 1) + 1.2)
    for kind, start, end in mine:
        colour = _HELD if (kind, start, end) == longest else COLOUR[kind]
        axes.barh(-1, end - start, left=start - first, height=1.0, color=colour, linewidth=0)
    for row, name in enumerate(sorted(others, key=ends.__getitem__), start=1):
        for kind, start, end in others[name]:
            axes.barh(row, end - start, left=start - first, height=0.72, color=COLOUR[kind], linewidth=0)
    told = f"its call was held for {longest[2] - longest[1]:.2f} s"
    axes.text((last - first) / 2, -1, told, ha="center", va="center", fontsize=9, color="white")
    # It may have been held for hours: what is shown is the time of the others, and a little before and after.
    span = last - first
    before = min(0.25 * span, first - min(start for _, start, _ in mine))
    after = min(0.25 * span, max(end for _, _, end in mine) - last)
    axes.set_xlim(-before - 0.01 * span, span + after + 0.01 * span)
    axes.set_ylim(len(others) + 0.6, -1.9)
    axes.set_yticks([-1, (len(others) + 1) / 2], [held, f"{len(others)} others"], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds since the others were started")
    axes.spines[["top", "right", "left"]].set_visible(False)
    _legend(figure, "generate", "tool", held=True)
    return _image(figure)


def places(arms: Mapping[str, Record], width: int) -> Image:
    """How the places of the batch were used over time, one panel an arm, on one time axis."""
    figure, panels = new_figure(10.0, 1.75 * len(arms) + 0.7, nrows=len(arms), sharex=True, sharey=True)
    longest = max(record.seconds for record in arms.values())
    for axes, (title, record) in zip(panels, arms.items(), strict=True):
        times = [record.seconds * step / 800 for step in range(801)]
        counts = [_counts(record, kind, times) for kind in COLOUR]
        axes.stackplot(times, counts, colors=list(COLOUR.values()), linewidth=0)
        axes.axvline(record.seconds, color=INK["text"], linewidth=0.8, linestyle=":")
        told = (
            f"{title}: all done after {record.seconds:.1f} s, the engine had work {record.busy_share:.0%} of the time"
        )
        axes.set_title(told, loc="left", fontsize=10)
        axes.set_ylim(0, width)
        axes.set_xlim(0, longest * 1.01)
        axes.spines[["top", "right"]].set_visible(False)
    panels[len(panels) // 2].set_ylabel(f"trajectories in flight (at most {width})")
    panels[-1].set_xlabel("seconds")
    _legend(figure)
    return _image(figure)


def _counts(record: Record, kind: str, times: Sequence[float]) -> list[int]:
    """How many trajectories were at it at each of these times since the record's start."""
    counts = [0] * len(times)
    step = times[1] - times[0]
    for found, start, end in record.all_stretches():
        if found == kind:
            first, last = math.ceil((start - record.start) / step), math.floor((end - record.start) / step)
            for at in range(first, min(last, len(times) - 1) + 1):
                counts[at] += 1
    return counts


def repeats(seconds: Mapping[str, Sequence[float]]) -> Image:
    """Each repeat a dot, the median a bar."""
    figure, axes = new_figure(10.0, 0.5 * len(seconds) + 0.6)
    for row, values in enumerate(seconds.values()):
        middle = statistics.median(values)
        last = row == len(seconds) - 1
        axes.barh(row, middle, height=0.6, color=INK["generate"] if last else "#c9d6e6")
        axes.plot(values, [row] * len(values), "o", color=INK["text"], markersize=4)
        axes.text(0.1, row, f"{middle:.1f} s", va="center", fontsize=9, color="white" if last else INK["text"])
    axes.set_yticks(range(len(seconds)), list(seconds), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(map(max, seconds.values())) * 1.03)
    axes.set_xlabel("seconds until every trajectory is done (bar: median, dots: each repeat)")
    axes.spines[["top", "right"]].set_visible(False)
    return _image(figure)


_STRIP = {
    PROMPT: ("#dddddd", "prompt"),
    MODEL: ("#9cc2ec", "model: trained"),
    TOOL: ("#f2d3a2", "tool, and the template around it: masked"),
}


def token_strip(trajectory: Trajectory, text_of: Callable[[list[int]], str], columns: int = 96) -> Image:
    """Every token in its box, coloured by who wrote it; under a trained one its probability as a bar."""
    boxes, line = [], -1
    for segment in trajectory.segments:
        column, line = 0, line + 1  # each begins a line
        for at in range(segment.start, segment.stop):
            text = text_of([trajectory.ids[at]]).replace("\n", "⏎").replace(" ", "␣")
            if column + len(text) > columns:
                column, line = 0, line + 1
            boxes.append((column, line, text, at, _STRIP[segment.kind][0]))
            column += len(text)
    figure, axes = new_figure(10.0, 0.36 * (line + 1) + 0.4)
    for column, line, text, at, colour in boxes:
        axes.add_patch(Rectangle((column, line), len(text), 0.74, facecolor=colour, edgecolor="white", linewidth=1.2))
        axes.text(column + len(text) / 2, line + 0.4, text, ha="center", va="center", fontsize=8, family="monospace")
        if trajectory.mask[at]:
            sure = math.exp(trajectory.logprobs[at])
            axes.add_patch(Rectangle((column, line + 0.78), len(text) * sure, 0.1, color=INK["generate"], linewidth=0))
    axes.set_xlim(0, columns)
    axes.set_ylim(line + 1, 0)
    axes.axis("off")
    handles: list[Any] = [Patch(color=colour, label=label) for colour, label in _STRIP.values()]
    handles.append(Patch(color=INK["generate"], label="bar: probability with which it was sampled"))
    figure.legend(handles=handles, loc="outside lower center", ncol=4, fontsize=8, frameon=False)
    return _image(figure)


def _bar(axes: Any, row: int, start: float, end: float, kind: str) -> None:
    if end > start:
        axes.barh(row, end - start, left=start, height=0.62, color=COLOUR[kind], edgecolor="white", linewidth=0.6)


def _legend(figure: Any, *kinds: str, held: bool = False) -> None:
    handles = [Patch(color=COLOUR[kind], label=WORDS[kind]) for kind in kinds or COLOUR]
    if held:
        handles.append(Patch(color=_HELD, label="the call that was held"))
    figure.legend(handles=handles, loc="outside lower center", ncol=3, fontsize=8, frameon=False)


def _image(figure: Any) -> Image:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=_DPI, facecolor="white")
    return Image(data=data.getvalue(), format="png", width=int(figure.get_figwidth() * 92))
