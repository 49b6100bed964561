"""The one exception of the process boundary, and the exit codes.

Invariant: `str(error)` is one or more whole sentences for a person (what happened, where, what would be right); nothing
that catches a NodeError needs to add to them.
"""

from __future__ import annotations

from typing import Final

EXIT_OK: Final = 0
EXIT_CHECK_FAILED: Final = 1  # the command ran, and what it checked does not hold
EXIT_USAGE: Final = 2  # settings, arguments or input files are wrong
EXIT_UNAVAILABLE: Final = 3  # a port is in use, a peer is down
EXIT_FAILED: Final = 4  # the process could not go on
EXIT_INTERRUPTED: Final = 130  # a second signal, or Ctrl-C in a command


class NodeError(Exception):
    """A failure a process ends with: its text is what the user reads, `exit_code` what the shell sees."""

    def __init__(self, sentence: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
