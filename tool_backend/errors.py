"""The errors of this package: what a tool wants the model to see, and what stops the process at its start."""

from __future__ import annotations

from node_runtime.errors import EXIT_USAGE, NodeError


class ToolError(Exception):
    """What the model should see: the tool ran and failed, and the message says why in one sentence."""


class BackendStartError(NodeError):
    """Something given to the process is wrong; it ends with exit code 2 and this one sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, EXIT_USAGE)
