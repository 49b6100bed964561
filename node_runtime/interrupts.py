"""Ctrl-C while a program still imports what it needs. Imports next to nothing, so that it can come first.

Invariant: an interrupted start is one sentence on stderr and exit code 130, not a traceback of whatever was loading.
"""

from __future__ import annotations

import os
import signal

from node_runtime.errors import EXIT_INTERRUPTED


def interruptible_start(process: str) -> None:
    """For the top of a program whose imports take seconds: until ``process.run`` takes over."""

    def on_signal(_number: int, _frame: object) -> None:
        exit_now(process, "interrupted while starting", EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, on_signal)


def exit_now(process: str, sentence: str, code: int) -> None:
    """Say why and leave, whatever else the interpreter would wait for."""
    os.write(2, f"{process}: {sentence}\n".encode())
    os._exit(code)
