"""Ctrl-C while a cluster runs: the first ends the work in order, the second ends everything at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from node_runtime.errors import EXIT_INTERRUPTED

_SHOW_CURSOR = b"\x1b[?25h\n"  # the live view hides it
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupts:
    """In an `async with` or `with` block of the main thread: the first signal cancels `work`, the second calls `kill`.

    After `kill` the process ends with EXIT_INTERRUPTED, whatever hangs.
    """

    def __init__(self, work: asyncio.Task[Any], *, say: Callable[[str], None], kill: Callable[[], None]) -> None:
        self._work = work
        self._say = say
        self._kill = kill
        self.count = 0

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        self.count += 1
        if self.count == 1:
            self._say(f"{signal.Signals(number).name}: stopping everything in order; once more ends it at once")
            self._work.cancel()
            return
        self._kill()
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)
        os.write(2, b"fermata: interrupted twice, everything was ended at once\n")
        os._exit(EXIT_INTERRUPTED)
