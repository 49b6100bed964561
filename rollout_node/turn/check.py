"""Files of cases run through the parser and the validator: what `fermata turn check` does.

Owns the case format. Invariant: a case passes only if every expected call came out, in order, with its arguments equal
as JSON and each number spelled as expected; a file that cannot be read is one sentence with its line.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fermata.v1 import tool_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from node_runtime.errors import EXIT_USAGE, NodeError
from node_runtime.outcomes import outcome_name
from rollout_node.turn.records import ParsedCall, ParsedTurn, ToolDefinition
from rollout_node.turn.sentences import quote
from rollout_node.turn.stream import CLOSE, OPEN, THINK, THINK_END, TurnGrammar, TurnStream
from rollout_node.turn.tool_set import ToolSet
from rollout_node.turn.vocabulary import Vocabulary

FORMATS = ("hermes",)
_TAGS = re.compile("|".join(map(re.escape, (OPEN, CLOSE, THINK, THINK_END))))
_STOP = "<|im_end|>"


class CaseFileError(NodeError):
    """A file of tools or cases cannot be used."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, EXIT_USAGE)


@dataclass(frozen=True)
class CaseResult:
    """``misses`` are sentences, none where the case passed. ``note`` says why a case does not apply to a tokenizer."""

    case_id: str
    line: int
    calls: tuple[ParsedCall, ...]
    text: str
    misses: tuple[str, ...]
    note: str = ""

    @property
    def passed(self) -> bool:
        return not self.misses


def check_cases(
    tools_path: Path | str,
    cases_path: Path | str,
    *,
    model_path: str | None = None,
    default_format: str = "hermes",
) -> list[CaseResult]:
    """One result for each case, in file order. CaseFileError where a file cannot be used.

    ``model_path``: cases are encoded with this model's tokenizer and stop token; without it with a small byte-level one
    that has the tags as control tokens.
    """
    tools = load_tools(Path(tools_path))
    vocabulary, stop_ids = _vocabulary(model_path)
    grammar = TurnGrammar(vocabulary, stop_ids)
    return [
        _check(case, line, f"{cases_path}:{line}", tools, grammar, stop_ids, default_format)
        for line, case in _load_cases(Path(cases_path))
    ]


def format_results(results: Sequence[CaseResult], *, only_misses: bool = False) -> str:
    """What each case gave, for people; the last line counts."""
    lines: list[str] = []
    for result in results:
        if result.passed and only_misses:
            continue
        lines.append(
            f"{'ok  ' if result.passed else 'MISS'} {result.case_id}{f' ({result.note})' if result.note else ''}"
        )
        for call in result.calls:
            what = quote(call.name) if call.name is not None else "(no name)"
            shown = call.message or quote((call.args_json or b"").decode("utf-8", "replace"), 200)
            lines.append(f"       {call.ordinal}: {what} {outcome_name(call.outcome)}: {shown}")
        lines += [f"       {miss}" for miss in result.misses]
    missed = sum(not result.passed for result in results)
    lines.append(f"{len(results)} cases, {missed} missed" if missed else f"{len(results)} cases, all as expected")
    return "\n".join(lines)


def load_tools(path: Path) -> ToolSet:
    """A JSON array of `{"name", "description", "parameters"}`, or of the OpenAI form."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CaseFileError(f"the tools file {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CaseFileError(f"the tools file {path} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise CaseFileError(f"the tools file {path} must be a JSON array of tools, got {type(entries).__name__}")
    tools: dict[str, ToolDefinition] = {}
    for i, entry in enumerate(entries):
        try:
            tool = ToolDefinition.from_mapping(entry if isinstance(entry, Mapping) else {})
        except ValueError as error:
            raise CaseFileError(f"tool {i} of {path} cannot be used: {error}") from error
        if tool.name in tools:
            raise CaseFileError(f"tool {i} of {path} has the name {tool.name!r} of an earlier one")
        tools[tool.name] = tool
    return ToolSet(tools)


def _load_cases(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise CaseFileError(f"the case file {path} cannot be read: {error}") from error
    cases: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CaseFileError(f"{path}:{number} is not JSON: {error}") from error
        if (
            not isinstance(case, dict)
            or not isinstance(case.get("completion", ""), str)
            or not isinstance(case.get("calls"), list)
            or ("completion" not in case and "pieces" not in case)
            or case.get("finish", "stop") not in ("stop", "length")
        ):
            raise CaseFileError(
                f'{path}:{number} is not a case: it needs "completion" (text) or "pieces", "calls" (an array) '
                'and "finish" ("stop" or "length")'
            )
        cases.append((number, case))
    return cases


def _vocabulary(model_path: str | None) -> tuple[Vocabulary, tuple[int, ...]]:
    if model_path is not None:
        from rollout_node.turn.loading import load_turn_format

        turn_format = load_turn_format(model_path, parser="hermes-text")
        return turn_format.vocabulary, turn_format.stop_token_ids
    vocabulary = Vocabulary(_byte_tokenizer())
    return vocabulary, (vocabulary.control[_STOP],)


def _byte_tokenizer() -> Tokenizer:
    """One token a byte, and the tags of the hermes format as control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", _STOP, OPEN, CLOSE, THINK, THINK_END)
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=name.startswith("<|")) for name in names])
    return tokenizer


def _check(
    case: dict[str, Any],
    line: int,
    where: str,
    tools: ToolSet,
    grammar: TurnGrammar,
    stop_ids: tuple[int, ...],
    default_format: str,
) -> CaseResult:
    case_id = str(case.get("id", f"line {line}"))
    form = case.get("format", default_format)
    if form not in FORMATS:
        raise CaseFileError(f"{where} has the format {form!r}; the formats are: {', '.join(FORMATS)}")
    ids, note = _encode(case, grammar.vocabulary, stop_ids, where)
    stream = TurnStream(grammar, tools)
    stream.feed(ids)
    turn = stream.finish(case.get("finish", "stop"))
    misses = () if note else tuple(_misses(case, turn, where))
    return CaseResult(case_id, line, turn.calls, turn.text, misses, note)


def _encode(
    case: dict[str, Any], vocabulary: Vocabulary, stop_ids: tuple[int, ...], where: str
) -> tuple[list[int], str]:
    """The ids of a case, and why it does not apply to this tokenizer or ""."""
    ids: list[int] = []
    if "pieces" in case:
        note = ""
        for piece in case["pieces"]:
            if not isinstance(piece, dict) or len(piece) != 1 or not isinstance(next(iter(piece.values())), str):
                raise CaseFileError(f'{where} has a piece that is neither {{"control": ...}} nor {{"text": ...}}')
            kind, text = next(iter(piece.items()))
            if kind == "text":
                ids += vocabulary.encode_plain(text)
            elif kind == "control":
                token_id = stop_ids[0] if text == _STOP else vocabulary.token_id(text)
                if token_id is None:
                    note = f"does not apply: the tokenizer has no control token {text}"
                    ids += vocabulary.encode_plain(text)
                else:
                    ids.append(token_id)
            else:
                raise CaseFileError(f'{where} has a piece {kind!r}; pieces are {{"control": ...}} or {{"text": ...}}')
        return ids, note
    text = case["completion"]
    stop = case.get("finish", "stop") == "stop"
    if stop:
        text = text.removesuffix(_STOP)
    position = 0
    for match in _TAGS.finditer(text):
        ids += vocabulary.encode_plain(text[position : match.start()])
        token_id = vocabulary.token_id(match.group())
        ids += vocabulary.encode_plain(match.group()) if token_id is None else [token_id]
        position = match.end()
    ids += vocabulary.encode_plain(text[position:])
    return ids + [stop_ids[0]] * stop, ""


def _misses(case: dict[str, Any], turn: ParsedTurn, where: str) -> Iterable[str]:
    expected = case["calls"]
    if len(expected) != len(turn.calls):
        yield f"expected {len(expected)} calls, got {len(turn.calls)}"
    if "text" in case and case["text"] != turn.text:
        yield f"expected the text {quote(str(case['text']), 200)}, got {quote(turn.text, 200)}"
    for i, (want, call) in enumerate(zip(expected, turn.calls, strict=False)):
        if not isinstance(want, dict) or not ("args" in want or "outcome" in want):
            raise CaseFileError(f'{where}, call {i}: an expected call has "tool" with "args" or with "outcome"')
        if "tool" in want and want["tool"] != call.name:
            yield f"call {i}: expected the tool {want['tool']!r}, got {call.name!r}"
        outcome = want.get("outcome", "OK")
        if f"OUTCOME_{outcome}" not in tool_pb2.Outcome.keys():  # noqa: SIM118 - an enum wrapper, not a dict
            raise CaseFileError(f"{where}, call {i}: there is no outcome {outcome!r}")
        if outcome != outcome_name(call.outcome):
            yield f"call {i}: expected {outcome}, got {outcome_name(call.outcome)}"
        for words in want.get("message_mentions", ()):
            if words not in call.message:
                yield f"call {i}: the message does not mention {words!r}"
        if "args" in want and (call.args_json is None or _spelled(want["args"]) != _spelled(call.args_json.decode())):
            yield f"call {i}: expected the arguments {want['args']}, got {(call.args_json or b'').decode()}"


def _spelled(args: str) -> Any:
    """JSON with its numbers as they are spelled: 1.0 is not 1, and nothing is rounded."""
    return json.loads(args, parse_int=lambda text: ("number", text), parse_float=lambda text: ("number", text))
