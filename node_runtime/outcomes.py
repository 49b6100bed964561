"""The outcome table: whom each outcome blames, who may retry it, and whether the model sees it.

Invariant: every value of the Outcome enum has a row, and an outcome this process does not know (a newer peer's) is
treated by the fault beside it; blame never moves from INFRA to MODEL by default, so infrastructure faults cannot reach
the model or the reward.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from fermata.v1 import tool_pb2
from fermata.v1.tool_pb2 import Fault, Outcome, Started


class Retry(enum.Enum):
    """When a gateway may make another attempt."""

    NEVER = "never"
    IDEMPOTENT = "idempotent"  # only a tool that may run again without harm
    PUSHBACK = "pushback"  # yes, not sooner than the peer asked
    ANY = "any"  # proven not started: any tool, another backend


class Row(NamedTuple):
    fault: Fault
    retry: Retry
    # Faults that a sender may put beside the outcome instead of the default.
    may_say: frozenset[Fault]


_MODEL = tool_pb2.FAULT_MODEL
_INFRA = tool_pb2.FAULT_INFRA
_CALLER = tool_pb2.FAULT_CALLER


def _row(fault: Fault, retry: Retry, *may_say: Fault) -> Row:
    return Row(fault, retry, frozenset((fault, *may_say)))


TABLE: Final[Mapping[Outcome, Row]] = MappingProxyType(
    {
        tool_pb2.OUTCOME_UNSPECIFIED: _row(_INFRA, Retry.NEVER),
        tool_pb2.OUTCOME_OK: _row(tool_pb2.FAULT_NONE, Retry.NEVER),
        # Whatever ran may say that it failed for reasons of its surroundings: INFRA masks, which is always safe.
        tool_pb2.OUTCOME_TOOL_ERROR: _row(_MODEL, Retry.NEVER, _INFRA),
        tool_pb2.OUTCOME_INVALID_ARGS: _row(_MODEL, Retry.NEVER),
        tool_pb2.OUTCOME_UNKNOWN_TOOL: _row(_MODEL, Retry.NEVER),
        tool_pb2.OUTCOME_PARSE_ERROR: _row(_MODEL, Retry.NEVER),
        tool_pb2.OUTCOME_TOOL_TIMEOUT: _row(_MODEL, Retry.NEVER, _INFRA),
        tool_pb2.OUTCOME_TOOL_OOM: _row(_MODEL, Retry.NEVER, _INFRA),
        tool_pb2.OUTCOME_ATTEMPT_TIMEOUT: _row(_INFRA, Retry.IDEMPOTENT, _MODEL),
        tool_pb2.OUTCOME_DEADLINE_EXCEEDED: _row(_INFRA, Retry.IDEMPOTENT, _MODEL),
        tool_pb2.OUTCOME_OVERLOADED: _row(_INFRA, Retry.PUSHBACK),
        tool_pb2.OUTCOME_QUEUE_TIMEOUT: _row(_INFRA, Retry.PUSHBACK),
        tool_pb2.OUTCOME_QUOTA_EXCEEDED: _row(_INFRA, Retry.PUSHBACK),
        tool_pb2.OUTCOME_NOT_STARTED: _row(_INFRA, Retry.ANY),
        tool_pb2.OUTCOME_INDETERMINATE: _row(_INFRA, Retry.IDEMPOTENT),
        tool_pb2.OUTCOME_SESSION_LOST: _row(_INFRA, Retry.NEVER),
        tool_pb2.OUTCOME_RESULT_EXPIRED: _row(_INFRA, Retry.NEVER),
        tool_pb2.OUTCOME_KEY_CONFLICT: _row(_INFRA, Retry.NEVER),
        tool_pb2.OUTCOME_FENCED: _row(_INFRA, Retry.NEVER),
        # A CANCELLED that nobody asked for is INFRA: whoever knows says so.
        tool_pb2.OUTCOME_CANCELLED: _row(_CALLER, Retry.NEVER, _INFRA),
        tool_pb2.OUTCOME_PERMISSION: _row(_INFRA, Retry.NEVER),
        tool_pb2.OUTCOME_INTERNAL: _row(_INFRA, Retry.NEVER),
        tool_pb2.OUTCOME_PROTOCOL: _row(_INFRA, Retry.NEVER),
    }
)

FAULT_OF: Final[Mapping[Outcome, Fault]] = MappingProxyType({o: r.fault for o, r in TABLE.items()})

_MODEL_SENTENCES: Final[Mapping[Outcome, str]] = MappingProxyType(
    {
        tool_pb2.OUTCOME_TOOL_ERROR: "The tool failed.",
        tool_pb2.OUTCOME_INVALID_ARGS: "The arguments do not fit the tool.",
        tool_pb2.OUTCOME_UNKNOWN_TOOL: "There is no such tool.",
        tool_pb2.OUTCOME_PARSE_ERROR: "The tool call could not be read.",
        tool_pb2.OUTCOME_TOOL_TIMEOUT: "The tool ran out of time.",
        tool_pb2.OUTCOME_TOOL_OOM: "The tool ran out of memory.",
        tool_pb2.OUTCOME_ATTEMPT_TIMEOUT: "The tool did not answer in time.",
        tool_pb2.OUTCOME_DEADLINE_EXCEEDED: "The tool did not answer in time.",
    }
)


def fault_of(outcome: Outcome, fault: Fault = tool_pb2.FAULT_UNSPECIFIED) -> Fault:
    """The fault that counts, given what the sender said.

    A known outcome takes the sender's fault only where the table allows it; an unknown outcome is its fault, and INFRA
    where the sender gave none that is known (an unknown end must not be scored).
    """
    row = TABLE.get(outcome)
    if row is None:
        return fault if fault in (_MODEL, _CALLER) else _INFRA
    return fault if fault in row.may_say else row.fault


def shown_to_model(outcome: Outcome, fault: Fault = tool_pb2.FAULT_UNSPECIFIED) -> bool:
    """True where the model is given an answer for this call, false where the trajectory has to be masked or dropped."""
    return fault_of(outcome, fault) in (tool_pb2.FAULT_NONE, _MODEL)


def retry_class(outcome: Outcome, fault: Fault = tool_pb2.FAULT_UNSPECIFIED) -> Retry:
    """Only INFRA is retried; an unknown INFRA outcome as one whose start cannot be disproved."""
    if fault_of(outcome, fault) != _INFRA:
        return Retry.NEVER
    row = TABLE.get(outcome)
    return Retry.IDEMPOTENT if row is None else row.retry


def is_retryable(
    outcome: Outcome,
    fault: Fault = tool_pb2.FAULT_UNSPECIFIED,
    *,
    idempotent: bool,
    started: Started = tool_pb2.STARTED_UNSPECIFIED,
) -> bool:
    """Whether another attempt may be made without breaking "a tool that is not idempotent starts at most once".

    `started` is what the ended attempt said. A local rejection (pushback, NOT_STARTED) that nevertheless says YES or
    UNKNOWN is a contradiction, and then only an idempotent tool may run again.
    """
    retry = retry_class(outcome, fault)
    if retry is Retry.NEVER:
        return False
    if idempotent or started == tool_pb2.STARTED_NO:
        return True
    return retry in (Retry.ANY, Retry.PUSHBACK) and started == tool_pb2.STARTED_UNSPECIFIED


def model_sentence(outcome: Outcome) -> str:
    """The fixed sentence the model reads where a MODEL fault brought no text of its own."""
    return _MODEL_SENTENCES.get(outcome, "The tool call failed.")


def outcome_name(outcome: Outcome) -> str:
    """ "TOOL_ERROR" for OUTCOME_TOOL_ERROR; "OUTCOME_57" for a value of a newer peer. For labels, logs and spans."""
    if outcome in TABLE:
        return Outcome.Name(outcome).removeprefix("OUTCOME_")
    return f"OUTCOME_{int(outcome)}"


def fault_name(fault: Fault) -> str:
    """ "INFRA" for FAULT_INFRA; "FAULT_9" for a value of a newer peer."""
    if fault in Fault.values():
        return Fault.Name(fault).removeprefix("FAULT_")
    return f"FAULT_{int(fault)}"


def sendable(text: str) -> str:
    """The text as a message can hold it: halves of surrogate pairs (file names that are no UTF-8) become "?"."""
    return text.encode("utf-8", "replace").decode()


def make_final(
    outcome: Outcome,
    *,
    detail: str = "",
    text: str | bytes | None = None,
    started: Started = tool_pb2.STARTED_UNSPECIFIED,
    fault: Fault = tool_pb2.FAULT_UNSPECIFIED,
    retry_after_ms: int | None = None,
) -> tool_pb2.Final:
    """A Final whose fault follows the table. `detail` is for people, `text` for the model."""
    final = tool_pb2.Final(outcome=outcome, fault=fault_of(outcome, fault), started=started, detail=sendable(detail))
    if text is not None:
        body = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        try:
            body.decode("utf-8")
        except UnicodeDecodeError:
            final.invalid_utf8 = True
        final.parts.append(tool_pb2.ContentPart(text=body, mime="text/plain"))
        final.total_bytes = len(body)
    if retry_after_ms is not None:
        final.retry_after_ms = retry_after_ms
    return final
