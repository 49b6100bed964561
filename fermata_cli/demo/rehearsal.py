"""Owns a rehearsal of the demo in one process: sampling in batches, with the tools' answers worked out on the spot.

The warm start uses it to print what its model can do; training by `fermata demo` uses the real nodes and tools instead.
Invariant: ids fed are ids kept, as in the rollout node; a row ends after its final answer or at `MAX_TOKENS`.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from fermata_cli.demo.chat import Chat
from tool_backend.calculator.tool import calculate
from tool_backend.errors import ToolError
from tool_backend.search.corpus import read_corpus
from tool_backend.search.index import SearchIndex
from tool_backend.search.tool import NO_HIT

MAX_TOKENS = 192
_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


@dataclasses.dataclass
class Rollout:
    """One finished row: ids, which of them the model sampled, and the log-probability of each of those when sampled."""

    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    answer: str | None = None
    calls: int = 0


class LocalTools:
    """The built-in tools without their processes, set as in the demo: one operator a calculation, one hit a search."""

    def __init__(self, corpus: Path, *, available: bool = True) -> None:
        self._index = SearchIndex(read_corpus(corpus))
        self._available = available

    def answer(self, turn: str) -> str | None:
        """The text answering the call in this turn, a sentence if it cannot run; None when the turn calls no tool."""
        if "<tool_call>" not in turn:
            return None
        try:
            call = json.loads(_CALL.search(turn)[1])
            name, arguments = call["name"], call["arguments"]
            if not self._available or name not in ("calculator", "search"):
                return f"no tool named '{name}' is available"
            return calculate(arguments["expression"], 1) if name == "calculator" else self._search(arguments["query"])
        except (TypeError, ValueError, KeyError, AttributeError):
            return "the call must be a JSON object with a name and arguments"
        except ToolError as error:
            return str(error)

    def _search(self, query: str) -> str:
        hits = self._index.search(query, 1)
        return f"{hits[0][0].title}: {hits[0][0].text}" if hits else NO_HIT


@torch.no_grad()
def sample(
    model: transformers.PreTrainedModel,
    chat: Chat,
    questions: Sequence[str],
    tools: LocalTools,
    *,
    temperature: float,
    generator: torch.Generator,
) -> list[Rollout]:
    """Answer every question, all rows in step: each step feeds one id a row, a given one while there are any.

    So every row has the same length in the cache and needs neither padding nor a mask. Temperature 0 is greedy.
    """
    rows = [Rollout(chat.question(text), [], []) for text in questions]
    for row in rows:
        row.sampled, row.logprobs = [False] * len(row.ids), [0.0] * len(row.ids)
    turns: list[list[int]] = [[] for _ in rows]
    live = list(range(len(rows)))
    fed = min(len(row.ids) for row in rows)
    cache = transformers.DynamicCache(config=model.config)
    inputs = torch.tensor([row.ids[:fed] for row in rows])
    while live:
        logits = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        picks = logits.argmax(-1, keepdim=True)
        if temperature:
            picks = torch.multinomial(logprobs.exp(), 1, generator=generator)
        picked = logprobs.gather(1, picks)[:, 0].tolist()
        for token, logprob, index in zip(picks[:, 0].tolist(), picked, live, strict=True):
            if len(rows[index].ids) == fed:
                _append(rows[index], turns[index], token, logprob, chat, tools)
        keep = [at for at, index in enumerate(live) if rows[index].answer is None and len(rows[index].ids) > fed]
        if len(keep) < len(live):
            cache.batch_select_indices(torch.tensor(keep, dtype=torch.long))
            live = [live[at] for at in keep]
        inputs = torch.tensor([[rows[index].ids[fed]] for index in live])
        fed += 1
    return rows


def _append(row: Rollout, turn: list[int], token: int, logprob: float, chat: Chat, tools: LocalTools) -> None:
    """Take one sampled token, and run the tool when it ends a turn with a call."""
    if len(row.ids) >= MAX_TOKENS:
        return
    row.ids.append(token)
    row.sampled.append(True)
    row.logprobs.append(logprob)
    if token != chat.end_id:
        turn.append(token)
        return
    text = chat.text(turn)
    turn.clear()
    answer = tools.answer(text)
    if answer is None:
        row.answer = text.strip()
        return
    row.calls += 1
    given = chat.tool_answer(answer)
    row.ids += given
    row.sampled += [False] * len(given)
    row.logprobs += [0.0] * len(given)
