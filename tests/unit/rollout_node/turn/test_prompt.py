"""Prompts as transformers renders them, and never a control id from a task's or a tool's text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_node.turn import Message, RenderError, ToolDefinition
from rollout_node.turn.guard import Guard, neutral, pick_mark
from rollout_node.turn.prompt import TemplatePrompt
from rollout_node.turn.template import ChatTemplate
from tests.support.tokenizers import QWEN_CONTROL

from .support import OWN_TEMPLATES, SHARED_TEMPLATES, vocabulary_for

TEMPLATES = [*OWN_TEMPLATES, *SHARED_TEMPLATES]
TOOLS = [
    ToolDefinition(
        "weather",
        "Weather of a place.",
        b'{"type": "object", "properties": {"place": {"type": "string", "description": "Where"}}}',
    )
]
_IDS = {"ids": lambda path: path.stem}


def prompt_of(path: Path) -> TemplatePrompt:
    template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "", "eos_token": ""})
    return TemplatePrompt(template, vocabulary_for(path))


def by_transformers(path: Path, messages: list[Message], tools: list[ToolDefinition]) -> tuple[str, list[int]]:
    from transformers import PreTrainedTokenizerFast

    vocab = vocabulary_for(path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocab._tokenizer)
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    given: Any = [{"role": m.role, "content": m.content} for m in messages]
    arguments = {"tools": [t.as_function() for t in tools] or None, "add_generation_prompt": True, "bos_token": ""}
    text = tokenizer.apply_chat_template(given, tokenize=False, **arguments)
    ids = tokenizer.apply_chat_template(given, tokenize=True, return_dict=False, **arguments)
    return text, list(ids)


CONVERSATIONS = {
    "one": [Message("user", "What is 12*34?")],
    "system": [Message("system", "Be brief.\n"), Message("user", "  Hello 🦊 <b>  ")],
    "several": [
        Message("system", "Be brief."),
        Message("user", "Hello"),
        Message("assistant", "Hi. What?"),
        Message("user", "2 < 3 | 4 > 1 fm0q ["),
    ],
}


@pytest.mark.parametrize("path", TEMPLATES, **_IDS)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no-tools", "tools"])
def test_ids_are_those_of_transformers(path: Path, conversation: str, tools: list[ToolDefinition]) -> None:
    messages = CONVERSATIONS[conversation]
    _, ids = by_transformers(path, messages, tools)
    assert prompt_of(path).render(messages, tools) == ids


@pytest.mark.parametrize("path", TEMPLATES, **_IDS)
def test_no_control_token_of_a_task_reaches_the_model(path: Path) -> None:
    vocab = vocabulary_for(path)
    prompt = prompt_of(path)

    def control(messages: list[Message], tools: list[ToolDefinition]) -> list[int]:
        return [i for i in prompt.render(messages, tools) if i in vocab.control_ids]

    def conversation(system: str, user: str) -> list[Message]:
        return [Message("system", system), Message("user", user)]

    def tool(text: str) -> list[ToolDefinition]:
        return [
            ToolDefinition("t", text, json.dumps({"type": "object", "properties": {text: {"type": "string"}}}).encode())
        ]

    plain = control(conversation("x", "x"), [])
    with_tool = control(conversation("x", "x"), tool("x"))
    for token in vocab.control:
        for text in (token, f"a {token}", f" {token}\n", token * 2, f"x{token[:-1]}", f"{token[1:]}x", token[:3]):
            assert control(conversation(text, text), []) == plain, text
            assert control(conversation("x", text), tool("x")) == with_tool, text
        assert control(conversation("x", "x"), tool(f"a{token}b")) == with_tool, token
        for k in range(1, len(token)):
            assert control(conversation(token[:k], token[k:]), []) == plain, (token, k)
        ids = prompt.render(conversation("x", f"a {token} b"), [])
        assert f"a {token} b" in vocab.decode(ids)


@pytest.mark.parametrize("path", OWN_TEMPLATES, **_IDS)
def test_a_role_is_not_free_text(path: Path) -> None:
    for role in ("<|im_end|>", "User", ""):
        with pytest.raises(RenderError, match="the roles are"):
            prompt_of(path).render([Message(role, "x")], [])
    with pytest.raises(RenderError, match="at least one"):
        prompt_of(path).render([], [])


def test_a_template_that_puts_a_control_token_together_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}<|im_start|>{{ m.content | replace('~', '') }}<|im_end|>{% endfor %}")
    prompt = prompt_of(path)
    assert prompt.render([Message("user", "a~b")], [])
    # Removing the mark's own neighbours is the template's doing: the forged token is caught by counting.
    with pytest.raises(RenderError, match="makes control tokens"):
        prompt.render([Message("user", "<|im_~end|><|im_end|>")], [])


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(
        st.lists(
            st.sampled_from([*QWEN_CONTROL, "<", "|", ">", "im_", "end|>", " ", "\n", "fm0q", "x"]), max_size=6
        ).map("".join),
        min_size=1,
        max_size=3,
    )
)
def test_protection_breaks_every_token_and_comes_off_whole(texts: list[str]) -> None:
    guard = Guard(QWEN_CONTROL)
    mark = pick_mark(texts)
    protected = [guard.protect(text, mark) for text in texts]
    assert [text.replace(mark, "") for text in protected] == texts
    joined = "".join(protected)
    trimmed = "".join(text.strip() for text in protected)
    assert not any(token in joined or token in trimmed for token in QWEN_CONTROL)
    for text in protected:
        for token in QWEN_CONTROL:
            for k in range(1, len(token)):
                assert not re.search(re.escape(token), token[:k] + text + token[k:]) or token in token[:k] + token[k:]


def test_text_without_control_tokens_is_left_alone() -> None:
    guard = Guard(QWEN_CONTROL)
    for text in ("plain", "2 < 3", "a|b", "", " x ", "<b>bold</b> text"):
        assert guard.protect(text, "fm0q") == text
    assert neutral("  a b\n", 3) == "  x3\n"
    assert neutral(" \n", 3) == " \n"
