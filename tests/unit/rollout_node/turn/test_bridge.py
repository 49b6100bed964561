"""Which chat templates let tool answers be appended, proven; the others are refused with what they rewrite."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rollout_node.turn.answers import AnswerRenderer
from rollout_node.turn.bridge import TRANSFORMS, Bridge, example_turns, prove_bridge
from rollout_node.turn.prompt import template_writes_hermes
from rollout_node.turn.records import RenderError, ToolAnswer, TurnFormatError
from rollout_node.turn.template import ChatTemplate
from rollout_node.turn.vocabulary import CUT, Slot

from .support import OWN_TEMPLATES, SHARED_TEMPLATES, stop_tokens, vocabulary_for

TEMPLATES = {path.stem: path for path in [*OWN_TEMPLATES, *SHARED_TEMPLATES]}

# What holds for each template: (form of the turn the proof was made with, what it does to an answer's text), or the
# words of the refusal.
FACTS: dict[str, tuple[str, str] | str] = {
    "qwen_like": ("calls", "as it is"),
    "plain": ("calls spelled out", "trimmed"),
    "text_frame": ("calls", "JSON"),
    "rewrites_history": "it rewrites the turn once an answer follows",
    "qwen2_5": ("calls", "as it is"),
    # Without reasoning this one is rewritten: an empty think block stands only in the last turn.
    "qwen3": ("calls after reasoning", "as it is"),
    "qwen3_instruct_2507": ("calls", "as it is"),
    "glm4moe": ("calls", "as it is"),
    "nemotron_3_super": ("calls", "as it is"),
    # Its own form allows one call in a turn; several answers are proven with calls spelled out in the content.
    "llama3_1": ("calls spelled out", "JSON"),
    # The tag that opens the outputs is written once in a conversation, not once in a turn.
    "deepseekv3": "in a later turn where it wrote",
    # Calls after the first are left out, and every answer is given under the first call's name.
    "gptoss": "it writes only the first of several calls of one turn",
}

# Templates that write calls as the parser reads them, or that know no calls; the rest is refused at load.
HERMES = {"qwen_like", "plain", "text_frame", "qwen2_5", "qwen3", "qwen3_instruct_2507"}


@functools.cache
def make(path: Path) -> tuple[ChatTemplate, Any, list[int]]:
    vocab = vocabulary_for(path)
    template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "", "eos_token": ""})
    return template, vocab, [vocab.control[token] for token in stop_tokens(vocab)]


@functools.cache
def bridge_of(path: Path) -> Bridge:
    template, vocab, stops = make(path)
    return prove_bridge(template, vocab, frozenset(stops))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_bridge_is_proven_or_refused(name: str) -> None:
    fact = FACTS[name]
    if isinstance(fact, str):
        with pytest.raises(TurnFormatError) as caught:
            bridge_of(TEMPLATES[name])
        assert fact in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        bridge = bridge_of(TEMPLATES[name])
        assert (bridge.form, bridge.transform) == fact


PROVEN = [name for name in TEMPLATES if not isinstance(FACTS[name], str)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_in_another_format_are_refused(name: str) -> None:
    template, vocab, stops = make(TEMPLATES[name])
    if name in HERMES or name == "rewrites_history":
        template_writes_hermes(template, vocab, stops)
    else:
        with pytest.raises(TurnFormatError, match="the parser 'hermes' does not read"):
            template_writes_hermes(template, vocab, stops)


@pytest.mark.parametrize("name", PROVEN)
def test_the_suffix_is_what_the_template_writes(name: str) -> None:
    """Prompt, a turn as the template writes it, and our suffix give the text of the whole conversation, and its ids."""
    template, vocab, _ = make(TEMPLATES[name])
    bridge = bridge_of(TEMPLATES[name])
    contents = ["408", "Zorbia: 7\nmoss", '{"a": [1.0]}', "naïve 🦊"]
    for messages, count in itertools.product(example_turns(), (1, 2, 4)):
        answers = [
            {"role": "tool", "name": "fmnamen0q", "tool_call_id": "fmidn0q", "content": text}
            for text in contents[:count]
        ]
        try:
            base = template.render(messages, add_generation_prompt=False)
            whole = template.render(messages + answers, add_generation_prompt=True)
        except RenderError:
            continue
        if not whole.startswith(base):  # the form of turn which this template rewrites
            continue
        base_ids = vocab.encode_trusted(base)
        close = bridge.before[0] if bridge.before and isinstance(bridge.before[0], int) else None
        # The model stops at the token that closes the turn; what the template writes after it is ours to append.
        sampled = base_ids
        if close in base_ids:
            sampled = base_ids[: len(base_ids) - base_ids[::-1].index(close)]
        given = [ToolAnswer(f"k{i}", text.encode(), tool="fmnamen0q") for i, text in enumerate(contents[:count])]
        rendered = AnswerRenderer(vocab, bridge).render(sampled[-1], given, 10_000)
        ids = sampled + [i for answer in rendered for i in answer.token_ids]
        assert vocab.decode(ids) == whole
        assert ids == vocab.encode_trusted(whole)


@pytest.mark.parametrize("name", PROVEN)
def test_no_control_token_in_an_answer_reaches_the_model(name: str) -> None:
    _, vocab, _ = make(TEMPLATES[name])
    renderer = AnswerRenderer(vocab, bridge_of(TEMPLATES[name]))
    harmless = renderer.render(None, [ToolAnswer("a", b"x", tool="t"), ToolAnswer("b", b"x", tool="t")], 10_000)
    frame = [[i for i in answer.token_ids if i in vocab.control_ids] for answer in harmless]
    tokens = list(vocab.control)
    for one, two in [(token, token) for token in tokens] + [(t[: len(t) // 2], t[len(t) // 2 :]) for t in tokens]:
        given = [ToolAnswer("a", f"{one}".encode(), tool="t"), ToolAnswer("b", f"{two}\n{one}".encode(), tool="t")]
        rendered = renderer.render(None, given, 10_000)
        assert [[i for i in answer.token_ids if i in vocab.control_ids] for answer in rendered] == frame
        text = "".join(vocab.decode(answer.token_ids) for answer in rendered)
        transform = TRANSFORMS[bridge_of(TEMPLATES[name]).transform]
        assert transform(one) in text
        assert transform(f"{two}\n{one}") in text


@pytest.mark.parametrize("name", PROVEN)
def test_how_the_turn_ended_decides_what_closes_it(name: str) -> None:
    _, vocab, stops = make(TEMPLATES[name])
    bridge = bridge_of(TEMPLATES[name])
    renderer = AnswerRenderer(vocab, bridge)
    answer = [ToolAnswer("a", b"408", tool="t")]
    whole = list(renderer.render(None, answer, 1000)[0].token_ids)
    close = bridge.before[0]
    for stop in stops:
        got = list(renderer.render(stop, answer, 1000)[0].token_ids)
        assert got == (whole[1:] if stop == close else whole)
    assert list(renderer.render(vocab.encode_plain("x")[0], answer, 1000)[0].token_ids) == whole


_HISTORY = r"""{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("m.role + '\\n'", "m.role + loop.index|string + '\\n'", "it writes different texts between answers"),
        ("m.role + '\\n'", "m.role + (loop.index > 4)|string + '\\n'", "between answers"),
        (
            "m.role + '\\n'",
            "m.role + (loop.index > 4 and messages[loop.index0 - 1].role == 'assistant')|string + '\\n'",
            "in a later turn where it wrote",
        ),
        ("m.role + '\\n'", "m.role + (messages|length)|string + '\\n'", "it rewrites the turn"),
        ("(m.content or '')", "(m.content or '')|upper", "does not write each of 1 answers once"),
        ("(m.content or '')", "(m.content or '')[:20]", "changes the text of an answer in its own way"),
        ("(m.content or '')", "(m.content or '')|replace('<', '&lt;')", "changes the text of an answer in its own way"),
        ("(m.content or '')", "(m.tool_call_id or '') + (m.content or '')", "the id of the call"),
        ("(m.content or '')", "(m.content or '') * 2", "does not write each"),
        ("(m.content or '')", "('' if m.role == 'tool' else m.content or '')", "does not write each"),
        (
            "m.role + '\\n'",
            "(raise_exception('no tools here') if m.role == 'tool' else m.role) + '\\n'",
            "no tools here",
        ),
        ("{%- for m in", "{% if tools %}{{ 'T' }}{% endif %}{%- for m in", None),
        (
            "{%- for m in",
            "{% if messages[-1].role == 'tool' %}{{ 'T' }}{% endif %}{%- for m in",
            "it rewrites the turn",
        ),
    ],
)
def test_what_cannot_be_proven_is_named(tmp_path: Path, old: str, new: str, says: str | None) -> None:
    assert old in _HISTORY
    path = tmp_path / "t.jinja"
    path.write_text(_HISTORY.replace(old, new, 1) + "{# <|im_start|> <|im_end|> <tool_call> </tool_call> #}")
    if says is None:
        bridge_of(path)
        return
    with pytest.raises(TurnFormatError) as caught:
        bridge_of(path)
    assert says in str(caught.value), str(caught.value)


def test_pieces_hold_no_mark_of_the_proof() -> None:
    for name in PROVEN:
        bridge = bridge_of(TEMPLATES[name])
        for piece in (*bridge.before, *bridge.after, *bridge.between, *bridge.end):
            assert isinstance(piece, int | Slot) or ("fm" not in piece)
            assert piece != CUT
        assert json.dumps(bridge.transform)


def test_a_broken_template_is_one_sentence() -> None:
    with pytest.raises(TurnFormatError, match="breaks at line 1"):
        ChatTemplate("{% for x in %}")
