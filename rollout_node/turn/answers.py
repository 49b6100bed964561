"""Tool output as tokens: any bytes to text, cut to what is left of the context, spliced into the bridge's frame.

Invariant: the ids of all answers together never exceed the budget, none of them is a control id but the frame's own,
and what is encoded is bounded by the budget, not by the size of the output.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from fermata.v1 import tool_pb2

from node_runtime.outcomes import model_sentence
from rollout_node.turn.bridge import TRANSFORMS, Bridge
from rollout_node.turn.records import BudgetExceeded, RenderedAnswer, ToolAnswer
from rollout_node.turn.vocabulary import Piece, Vocabulary

# Output with more characters than this per token of budget is taken to be too long without counting its tokens.
_CHARS_PER_TOKEN = 8
_SLACK_CHARS = 256
_SAMPLE_CHARS = 2048

_SENTENCES = frozenset({tool_pb2.OUTCOME_INVALID_ARGS, tool_pb2.OUTCOME_UNKNOWN_TOOL, tool_pb2.OUTCOME_PARSE_ERROR})


@dataclass(frozen=True, slots=True)
class _Text:
    """``lead`` (what happened to the call) is never cut; ``body`` is the tool's own output."""

    lead: str
    body: str
    invalid_utf8: bool
    missing_bytes: int  # cut off upstream


def answer_text(answer: ToolAnswer) -> tuple[str, str, bool]:
    """(a leading sentence of ours or "", the tool's text, whether its bytes were not UTF-8)."""
    try:
        body, invalid = answer.data.decode("utf-8"), False
    except UnicodeDecodeError:
        body, invalid = answer.data.decode("utf-8", "replace"), True
    if answer.outcome == tool_pb2.OUTCOME_OK:
        return "", body, invalid
    if answer.outcome in _SENTENCES:
        return "", body or model_sentence(answer.outcome), invalid
    if answer.outcome == tool_pb2.OUTCOME_TOOL_ERROR:
        return ("Error: ", body, invalid) if body else (f"Error: {model_sentence(answer.outcome)}", "", invalid)
    sentence = f"Error: {model_sentence(answer.outcome)}"
    return (f"{sentence} Output so far:\n" if body else sentence), body, invalid


class AnswerRenderer:
    """Splices answers into one model's bridge."""

    def __init__(self, vocabulary: Vocabulary, bridge: Bridge) -> None:
        self._vocabulary = vocabulary
        self._bridge = bridge
        self._transform = TRANSFORMS[bridge.transform]

    def render(self, last_id: int | None, answers: Sequence[ToolAnswer], budget_tokens: int) -> list[RenderedAnswer]:
        """One RenderedAnswer for each answer, in order; their ids joined are at most ``budget_tokens`` long.

        ``last_id`` is the last sampled id: where the model itself wrote the stop token that closes the turn, the
        suffix begins after it, else with it. BudgetExceeded where not even the markers fit.
        """
        if not answers:
            raise ValueError("render_results needs at least one answer; a turn without calls has no suffix")
        if budget_tokens <= 0:
            raise BudgetExceeded(len(answers), budget_tokens, len(answers))
        jobs = [
            _Job(self, frame, answer)
            for frame, answer in zip(self._frames(last_id, len(answers)), answers, strict=True)
        ]
        left = budget_tokens
        for job in sorted(jobs, key=lambda job: job.chars):  # stable: equals in call order
            job.measure(left, budget_tokens)
            left -= job.whole
        shares = _share(budget_tokens, [(job.least, job.whole) for job in jobs])
        if shares is None:
            raise BudgetExceeded(sum(job.least for job in jobs), budget_tokens, len(answers))
        return [job.rendered(share) for job, share in zip(jobs, shares, strict=True)]

    def _frames(self, last_id: int | None, count: int) -> list[tuple[tuple[Piece, ...], tuple[Piece, ...]]]:
        bridge = self._bridge
        before = _after_close(bridge.before, last_id)
        return [
            (before if i == 0 else bridge.between, bridge.end if i == count - 1 else bridge.after) for i in range(count)
        ]

    def encode(self, frame: tuple[tuple[Piece, ...], tuple[Piece, ...]], text: str, tool: str) -> list[int]:
        before, after = frame
        texts = ("", tool)
        return self._vocabulary.encode_pieces([*before, self._transform(text), *after], texts)

    def char_spans(self, text: str) -> list[tuple[int, int]]:
        return self._vocabulary.plain_spans(text)


class _Job:
    """One answer: what it needs at most and at least, and its ids for a share of the budget."""

    def __init__(
        self,
        renderer: AnswerRenderer,
        frame: tuple[tuple[Piece, ...], tuple[Piece, ...]],
        answer: ToolAnswer,
    ) -> None:
        self._renderer = renderer
        self._frame = frame
        self._answer = answer
        self._lead, self._body, self._invalid = answer_text(answer)
        missing = max(0, answer.total_bytes - len(answer.data)) if answer.total_bytes else 0
        self._trail = f"\n[{missing} more bytes were left out]" if missing else ""
        self._whole_ids: list[int] | None = None
        self.chars = len(self._body)
        self.whole = self.least = 0

    def measure(self, left: int, budget: int) -> None:
        """Counts tokens, given what shorter answers left of the budget; what is surely too long is not encoded."""
        if self.chars <= max(left, 0) * _CHARS_PER_TOKEN + _SLACK_CHARS:
            self._whole_ids = self._encode(self._body)
        self.least = len(self._encode(_marker(self.chars)))
        if self._whole_ids is None:
            self.whole = max(budget, self.least) + 1  # not known, and more than there is
        else:
            self.whole = len(self._whole_ids)
            self.least = min(self.least, self.whole)

    def _encode(self, body: str) -> list[int]:
        return self._renderer.encode(self._frame, self._lead + body + self._trail, self._answer.tool)

    def rendered(self, share: int) -> RenderedAnswer:
        ids, left_out = self._whole_ids, 0
        if ids is None or len(ids) > share:
            ids, left_out = self._cut(share)
        return RenderedAnswer(self._answer.call_key, array("i", ids), self._invalid, left_out)

    def _cut(self, share: int) -> tuple[list[int], int]:
        """Head and tail kept, the marker between them; as much as fits, found by shrinking from an estimate."""
        keep = share - self.least
        head_text = self._body[: self._window(self._body[:_SAMPLE_CHARS], keep - keep // 3)]
        tail_text = self._body[-self._window(self._body[-_SAMPLE_CHARS:], keep // 3) :]
        head_spans, tail_spans = self._renderer.char_spans(head_text), self._renderer.char_spans(tail_text)
        while keep > 0:
            tail_tokens = keep // 3
            head_end = _end_of(head_spans, keep - tail_tokens)
            tail_start = len(self._body) - len(tail_text) + _start_of(tail_spans, tail_tokens, len(tail_text))
            # A window that holds everything: keep less, never the same character twice.
            if tail_start > head_end:
                left_out = tail_start - head_end
                ids = self._encode(self._body[:head_end] + _marker(left_out) + self._body[tail_start:])
                if len(ids) <= share:
                    return ids, left_out
                keep -= max(1, len(ids) - share)
            else:
                keep -= max(1, keep // 8)
        return self._encode(_marker(len(self._body))), len(self._body)

    def _window(self, sample: str, tokens: int) -> int:
        """How many characters to encode to find ``tokens`` tokens, judged by a sample of them."""
        per_token = len(sample) / max(1, len(self._renderer.char_spans(sample)))
        return int(max(0, tokens) * min(per_token * 1.2, _CHARS_PER_TOKEN)) + _SLACK_CHARS


def _after_close(before: tuple[Piece, ...], last_id: int | None) -> tuple[Piece, ...]:
    """``before`` without what the model wrote itself: the stop token of the turn, or (where the next message's opening
    token is what stops the model) that opening token."""
    for i, piece in enumerate(before):
        if not isinstance(piece, int):
            break
        if piece == last_id:
            return before[i + 1 :]
    return before


def _marker(left_out: int) -> str:
    return f"\n[... {left_out} characters left out ...]\n"


def _end_of(spans: list[tuple[int, int]], tokens: int) -> int:
    """Where the first ``tokens`` tokens end, never inside a character that goes on in the next token."""
    if tokens <= 0 or not spans:
        return 0
    if tokens >= len(spans):
        return spans[-1][1]
    return min(spans[tokens - 1][1], spans[tokens][0])


def _start_of(spans: list[tuple[int, int]], tokens: int, length: int) -> int:
    """Where the last ``tokens`` tokens begin."""
    if tokens <= 0 or not spans:
        return length
    if tokens >= len(spans):
        return spans[0][0]
    return max(spans[-tokens][0], spans[-tokens - 1][1])


def _share(budget: int, needs: Sequence[tuple[int, int]]) -> list[int] | None:
    """Splits the budget: nobody gets less than his least or more than his whole; what is scarce is shared evenly.

    ``needs`` are (least, whole). None where the least of all do not fit.
    """
    shares = [least for least, _ in needs]
    left = budget - sum(shares)
    if left < 0:
        return None
    # The level is raised for everybody at once, from the smallest need up.
    while left > 0:
        open_ones = [i for i, (_, whole) in enumerate(needs) if shares[i] < whole]
        if not open_ones:
            break
        lowest = min(shares[i] for i in open_ones)
        lowest_ones = [i for i in open_ones if shares[i] == lowest]
        higher = [shares[i] for i in open_ones if shares[i] > lowest]
        ceiling = min([needs[i][1] for i in lowest_ones] + higher)
        step = min(ceiling - lowest, left // len(lowest_ones))
        if step == 0:
            for i in lowest_ones[:left]:
                shares[i] += 1
            break
        for i in lowest_ones:
            shares[i] += step
        left -= step * len(lowest_ones)
    return shares
