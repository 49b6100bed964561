"""Standard output belongs to the ready line; whatever tools print goes to standard error.

Works on the file descriptor, so output of C libraries and of child processes is turned aside too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class StdoutGuard:
    """From ``install`` on, descriptor 1 and ``sys.stdout`` lead to standard error."""

    def __init__(self) -> None:
        self._real: TextIO | None = None

    def install(self) -> None:
        """Turn standard output aside; to be called before any tool is imported."""
        sys.stdout.flush()
        real = os.dup(1)
        os.dup2(2, 1)
        self._real = os.fdopen(real, "w", encoding="utf-8")
        sys.stdout = sys.stderr

    @contextlib.contextmanager
    def real_stdout(self) -> Iterator[None]:
        """For the ready line: ``sys.stdout`` is the real one. To be used while no tool runs."""
        aside = sys.stdout
        sys.stdout = self._real or aside
        try:
            yield
            sys.stdout.flush()
        finally:
            sys.stdout = aside
