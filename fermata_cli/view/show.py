"""Shows a run on stderr: a live view on a terminal, plain lines elsewhere.

Invariant: nothing of it reaches stdout; text from elsewhere is escaped before it is drawn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fermata_cli.view.state import PHASES, SLOW_S, RunView

_QUIET_S = 14.0  # and a look takes a moment: a line at least every 15 s
_DOING = ("startup", "start", "load", "connect", "stopping")  # "still starting the cluster"
_BARS = "▁▂▃▄▅▆▇█"


class Show(Protocol):
    def say(self, sentence: str) -> None:
        """Tell one thing that happened."""
        ...

    def refresh(self) -> None:
        """Draw the present state."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_show(view: RunView, *, plain: bool) -> Show:
    return PlainShow(view) if plain or not sys.stderr.isatty() else LiveShow(view)


class PlainShow:
    """One line per event, with the seconds since the start; and one every so often where nothing happens."""

    def __init__(self, view: RunView, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._clock = clock
        self._begun = self._said = clock()

    def say(self, sentence: str) -> None:
        self._view.say(sentence)
        self._said = self._clock()
        print(f"[{self._said - self._begun:6.1f} s] {sentence}", file=sys.stderr, flush=True)

    def refresh(self) -> None:
        if self._clock() - self._said >= _QUIET_S and self._view.phase != "stay":  # which may last for days
            self.say(f"still {self._view.now}" if self._view.phase in _DOING else self._view.now)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class LiveShow:
    """A panel that is drawn again and again at the bottom; what is said scrolls away above it."""

    def __init__(self, view: RunView, console: Console | None = None) -> None:
        self._view = view
        self._begun = time.monotonic()
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=4, transient=True)

    def say(self, sentence: str) -> None:
        self._view.say(sentence)
        self._live.console.print(Text(f"[{time.monotonic() - self._begun:6.1f} s] {sentence}"))

    def refresh(self) -> None:
        self._live.refresh()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _draw(self) -> Panel:
        return draw(self._view, time.monotonic() - self._begun)


def draw(view: RunView, seconds: float) -> Panel:
    """The panel of one moment. All text goes in as `Text`, which knows no markup."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", justify="right")
    table.add_column()
    for name, value in _rows(view):
        table.add_row(name, Text(value))
    parts: list[object] = [table]
    if view.eval_progress is not None:
        done, of = view.eval_progress
        parts.append(ProgressBar(total=of, completed=done, width=40))
    elif view.steps:
        parts.append(ProgressBar(total=view.steps, completed=view.step, width=40))
    title = Text(f"fermata · {PHASES.get(view.phase, view.phase)} · {seconds:.0f} s")
    return Panel(Group(*parts), title=title, title_align="left")  # type: ignore[arg-type]


def _rows(view: RunView) -> list[tuple[str, str]]:
    started = view.step > 0 or view.steps is not None
    rows = [
        ("step", f"{view.step} of {view.steps if view.steps is not None else '–'}") if started else ("now", view.now)
    ]
    if view.rewards:
        rows.append(("reward", f"{sparkline(view.rewards[-48:])}  {view.rewards[-1]:.3f}"))
    if view.accuracies:
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in view.accuracies.items())
        rows.append(("held-out accuracy", shown))
    if view.eval_progress is not None:
        rows.append(("evaluated", "{} of {}".format(*view.eval_progress)))
    if view.states:
        rows.append(("trajectories", ", ".join(f"{count} {state}" for state, count in sorted(view.states.items()))))
    if view.calls_done is not None:
        slow = f"{view.calls_slow} took over {SLOW_S} s"
        rows.append(("tool calls", f"{view.calls_in_flight} in flight, {view.calls_done} done, {slow}"))
    if view.tokens_per_second is not None:
        rows.append(("tokens", f"{view.tokens_per_second:,.0f} a second"))
    if view.version is not None:
        age = "–" if view.staleness is None else f"{view.staleness} version{'s' * (view.staleness != 1)} old"
        rows.append(("weights", f"version {view.version}, oldest token trained {age}"))
    if view.masked_share is not None:
        rows.append(("masked samples", f"{view.masked_share:.1%}"))
    return rows


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """One bar a value, on a scale from `low` to `high`."""
    span = high - low or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int((value - low) / span * len(_BARS))))] for value in values)
