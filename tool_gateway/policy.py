"""What follows the end of an attempt: done, rejoin the instance, or try again. Pure: times and ends in, decisions out.

Invariant: a tool that is not idempotent gets another attempt only where the ended one is proven not to have started.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from fermata.v1 import tool_pb2

from node_runtime.outcomes import fault_of, is_retryable, make_final, model_sentence, outcome_name
from tool_gateway.settings import RetrySettings

MAX_DETAIL: Final = 2000
MAX_REJOINS: Final = 20
"""Cuts that one attempt survives: each needs an instance that had answered since the one before."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The backend gave a Final."""

    final: tool_pb2.Final


@dataclass(frozen=True, slots=True)
class NotSent:
    """No connection was made for this attempt: proven not started."""

    detail: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection broke (or the RPC failed as infrastructure) after the request may have left."""

    detail: str
    joined: bool = False
    """The instance had answered before: the call was known there."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The attempt's or the heartbeat's time ran out here; a Cancel is on its way."""

    detail: str
    heartbeat: bool = False


@dataclass(frozen=True, slots=True)
class Absent:
    """The very instance that the attempt was meant for says that it does not know the key."""

    tombstoned: bool
    expired: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGone:
    """Another instance answers at the address, or none did for as long as the policy waits."""

    detail: str


AttemptEnd = Finished | NotSent | Lost | TimedOut | Absent | InstanceGone


@dataclass(frozen=True, slots=True)
class Done:
    final: tool_pb2.Final


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Seek the same instance for up to `within_s` seconds and attach to the call there."""

    within_s: float


@dataclass(frozen=True, slots=True)
class Retry:
    """Make another attempt after `delay_s`, elsewhere where that is possible."""

    delay_s: float


Decision = Done | Rejoin | Retry


@dataclass(frozen=True, slots=True)
class ToolTraits:
    """What of a ToolSpec the policy goes by."""

    idempotent: bool = False
    timeout_fault: tool_pb2.Fault = tool_pb2.FAULT_INFRA

    @classmethod
    def of(cls, spec: tool_pb2.ToolSpec) -> ToolTraits:
        model = spec.timeout_fault == tool_pb2.FAULT_MODEL
        return cls(spec.idempotent, tool_pb2.FAULT_MODEL if model else tool_pb2.FAULT_INFRA)


class RetryPolicy:
    """Full jitter (AWS Architecture Blog, "Exponential Backoff And Jitter"): uniform in [0, min(max, base × 2ⁿ)]."""

    def __init__(self, settings: RetrySettings, rng: random.Random | None = None) -> None:
        self._settings = settings
        self._rng = rng or random.Random()

    def after(
        self, end: AttemptEnd, traits: ToolTraits, *, attempt: int, remaining_s: float, rejoins: int = 0
    ) -> Decision:
        """`attempt` counts from 1 over all backends, `rejoins` the Rejoins already followed for this attempt."""
        if isinstance(end, Lost):
            if rejoins >= MAX_REJOINS:
                return self.after(InstanceGone(end.detail), traits, attempt=attempt, remaining_s=remaining_s)
            settings = self._settings
            within = settings.rejoin_idempotent_s if traits.idempotent else settings.rejoin_s
            return Rejoin(min(within, remaining_s))
        final = self.final_of(end, traits)
        if not is_retryable(final.outcome, final.fault, idempotent=traits.idempotent, started=final.started):
            return Done(final)
        if attempt >= self._settings.attempts:
            return Done(final)
        delay_s = self.pause(attempt)
        if final.HasField("retry_after_ms"):
            delay_s = max(delay_s, final.retry_after_ms / 1000)
        if delay_s >= remaining_s:
            return Done(final)
        return Retry(delay_s)

    def pause(self, attempt: int) -> float:
        ceiling = min(self._settings.max_s, self._settings.base_s * 2.0 ** min(attempt - 1, 30))
        return self._rng.uniform(0, ceiling)

    def final_of(self, end: AttemptEnd, traits: ToolTraits) -> tool_pb2.Final:
        """The Final that this end would be, were it the last."""
        match end:
            case Finished(final):
                return normalise(final, traits)
            case NotSent(detail):
                return make_final(tool_pb2.OUTCOME_NOT_STARTED, detail=detail, started=tool_pb2.STARTED_NO)
            case TimedOut(detail, heartbeat):
                # Heartbeats come from the backend's loop, not from the tool: their silence is no fault of the tool's.
                return timeout_final(tool_pb2.OUTCOME_ATTEMPT_TIMEOUT, traits, detail, infra=heartbeat)
            case Absent(tombstoned=True):
                detail = "the instance was cut off before the call began there, and will not begin it"
                return make_final(tool_pb2.OUTCOME_NOT_STARTED, detail=detail, started=tool_pb2.STARTED_NO)
            case Absent(expired=True):
                detail = "the instance ran the call but no longer holds its result"
                return make_final(tool_pb2.OUTCOME_RESULT_EXPIRED, detail=detail, started=tool_pb2.STARTED_YES)
            case Absent():
                detail = "the instance does not know the call, and laid no tombstone that would prove it never will"
                return make_final(tool_pb2.OUTCOME_INDETERMINATE, detail=detail, started=tool_pb2.STARTED_UNKNOWN)
            case Lost(detail) | InstanceGone(detail):
                return make_final(tool_pb2.OUTCOME_INDETERMINATE, detail=detail, started=tool_pb2.STARTED_UNKNOWN)


def timeout_final(
    outcome: tool_pb2.Outcome,
    traits: ToolTraits,
    detail: str,
    *,
    started: tool_pb2.Started = tool_pb2.STARTED_UNKNOWN,
    infra: bool = False,
) -> tool_pb2.Final:
    """A time that ran out: the tool's own timeout_fault, except where the infrastructure took the time."""
    fault = tool_pb2.FAULT_INFRA if infra else traits.timeout_fault
    text = model_sentence(outcome) if fault == tool_pb2.FAULT_MODEL else None
    return make_final(outcome, detail=detail, started=started, fault=fault, text=text)


def normalise(final: tool_pb2.Final, traits: ToolTraits) -> tool_pb2.Final:
    """A backend's Final as the gateway vouches for it: blame by the outcome table, a text where the model sees one."""
    outcome = final.outcome
    if outcome == tool_pb2.OUTCOME_UNSPECIFIED:
        detail = "the backend ended the call without naming an outcome"
        return make_final(tool_pb2.OUTCOME_PROTOCOL, detail=detail, started=tool_pb2.STARTED_UNKNOWN)
    out = tool_pb2.Final()
    out.CopyFrom(final)
    if len(out.detail) > MAX_DETAIL:
        out.detail = out.detail[:MAX_DETAIL] + "..."
    if outcome in (tool_pb2.OUTCOME_ATTEMPT_TIMEOUT, tool_pb2.OUTCOME_DEADLINE_EXCEEDED):
        out.fault = tool_pb2.FAULT_INFRA if final.started == tool_pb2.STARTED_NO else traits.timeout_fault
    elif outcome == tool_pb2.OUTCOME_CANCELLED:
        out.fault = tool_pb2.FAULT_INFRA  # whoever asked for a cancel has its result already
        out.detail = out.detail or "the backend ended the call as cancelled, and nobody had asked for it"
    else:
        out.fault = fault_of(outcome, final.fault)
    if out.started == tool_pb2.STARTED_UNSPECIFIED:
        ran = outcome in (tool_pb2.OUTCOME_OK, tool_pb2.OUTCOME_TOOL_ERROR, tool_pb2.OUTCOME_TOOL_TIMEOUT)
        out.started = tool_pb2.STARTED_YES if ran else tool_pb2.STARTED_UNKNOWN
    if out.fault == tool_pb2.FAULT_MODEL and not out.parts:
        out.parts.append(tool_pb2.ContentPart(text=model_sentence(outcome).encode(), mime="text/plain"))
    if out.fault == tool_pb2.FAULT_INFRA and not out.detail:
        out.detail = f"the backend ended the call with {outcome_name(outcome)} and gave no detail"
    return out


def vouch(final: tool_pb2.Final, *, unproven: bool) -> tool_pb2.Final:
    """The call's Final, of its last attempt's: NOT_STARTED speaks for every attempt, or it is INDETERMINATE."""
    if not unproven or final.started != tool_pb2.STARTED_NO:
        return final
    if final.outcome != tool_pb2.OUTCOME_NOT_STARTED:
        out = tool_pb2.Final()
        out.CopyFrom(final)
        out.started = tool_pb2.STARTED_UNKNOWN
        return out
    detail = f"an earlier attempt may have started; of the last one: {final.detail}"
    return make_final(tool_pb2.OUTCOME_INDETERMINATE, detail=detail, started=tool_pb2.STARTED_UNKNOWN)


def cut_output(final: tool_pb2.Final, max_bytes: int) -> tool_pb2.Final:
    """The Final with at most `max_bytes` of output; a cut one says so, and keeps the size of the whole content.

    The content goes before its structured twin, which is left out as a whole: of a content that is all there nobody is
    told that bytes are missing.
    """
    content = sum(_part_bytes(part) for part in final.parts)
    if content + len(final.structured_json) <= max_bytes:
        return final
    out = tool_pb2.Final()
    out.CopyFrom(final)
    del out.parts[:]
    out.total_bytes = max(final.total_bytes, content if final.parts else len(final.structured_json))
    out.truncated = True
    left = max_bytes
    for part in final.parts:
        kept = _cut_part(part, left, final.invalid_utf8)
        if kept is None:
            break
        out.parts.append(kept)
        left -= _part_bytes(kept)
        if kept is not part:
            break  # nothing follows a part that was cut
    if len(final.structured_json) > left:
        out.structured_json = b""  # half a JSON document is none
    return out


def _part_bytes(part: tool_pb2.ContentPart) -> int:
    return len(part.text) + len(part.inline) + len(part.uri)


def _cut_part(part: tool_pb2.ContentPart, left: int, invalid_utf8: bool) -> tool_pb2.ContentPart | None:
    """The part within `left` bytes: whole, a text cut between two characters, or None (bytes and uris do not split)."""
    if _part_bytes(part) <= left:
        return part
    if part.WhichOneof("body") != "text" or left <= 0:
        return None
    text = part.text[:left]
    if not invalid_utf8:
        text = text.decode("utf-8", "ignore").encode()
    return tool_pb2.ContentPart(text=text, mime=part.mime)
