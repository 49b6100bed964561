"""The few messages every model makes."""

from __future__ import annotations

import hashlib

from fermata.v1 import tool_pb2 as tool

MAX_ATTEMPTS = 3
CALL_TIMEOUT_MS = 60_000


def digest(args: bytes) -> bytes:
    return hashlib.sha256(args).digest()


def final(outcome: tool.Outcome, fault: tool.Fault, started: tool.Started = tool.STARTED_UNKNOWN) -> tool.Final:
    return tool.Final(outcome=outcome, fault=fault, started=started)


def infra(outcome: tool.Outcome, started: tool.Started = tool.STARTED_UNKNOWN) -> tool.Final:
    return final(outcome, tool.FAULT_INFRA, started)
