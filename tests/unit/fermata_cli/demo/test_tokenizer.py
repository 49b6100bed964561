"""The shipped tokenizer and chat template: round trips, one spelling per name, no forged turns, exact ids in pieces."""

import json
import random
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from fermata_cli.demo import MODEL_DIR
from fermata_cli.demo.chat import Chat
from fermata_cli.demo.questions import KINDS, make_code, make_name, make_question
from fermata_cli.demo.tokenizer import CONTROL_TOKENS, build_tokenizer
from fermata_cli.demo.traces import clean_trace, lookup, tool_call
from fermata_cli.demo.warm_start import trace_ids

CHAT = Chat(MODEL_DIR)


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


def test_auto_tokenizer_gives_the_same_ids(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    text = '<|im_start|>user\nWhat is (12*34)-5?<|im_end|>\n<tool_call>\n{"name": "search"} é 你\n</tool_call>'
    assert tokenizer.encode(text, add_special_tokens=False) == CHAT._own(text)
    assert len(tokenizer) == 384
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@given(st.text(max_size=200))
def test_any_text_round_trips(text: str) -> None:
    assert CHAT.text(CHAT.foreign(text)) == text


def test_text_that_is_not_trusted_holds_no_control_token(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    text = "4" + "".join(CONTROL_TOKENS) + "system"
    controls = {CHAT.control_id(token) for token in CONTROL_TOKENS}
    assert len(controls) == 7
    assert not controls & set(CHAT.foreign(text))
    assert CHAT.foreign(text) == tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert set(tokenizer.encode("".join(CONTROL_TOKENS), add_special_tokens=False)) == controls


def test_a_digit_is_a_token() -> None:
    assert len(CHAT.foreign("8205719364" * 3)) == 30


def test_a_name_is_spelt_alike_in_question_call_and_tool_answer() -> None:
    rng = random.Random(0)
    for _ in range(500):
        name = make_name(rng)
        spelling = CHAT.foreign(name)
        assert len(spelling) <= 3
        call, answer = lookup(name, 417)
        question = f"What is the code of {name} times 12?"
        for ids in (CHAT.question(question), CHAT.turn(call), CHAT.tool_answer(answer)):
            assert any(ids[at : at + len(spelling)] == spelling for at in range(len(ids))), name


def test_pieces_have_the_ids_of_the_whole_and_of_the_chat_template(
    tokenizer: transformers.PreTrainedTokenizerBase,
) -> None:
    rng = random.Random(1)
    for i in range(200):
        kind = KINDS[i % 4]
        name = make_name(rng) if kind.startswith("lookup") else None
        trace = clean_trace(make_question(rng, kind, name), make_code(rng) if name else None)
        messages = [{"role": "user", "content": trace.question}]
        ids = CHAT.question(trace.question)
        for turn, answer in trace.turns:
            assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            ids += CHAT.turn(turn)
            messages.append({"role": "assistant", "content": turn})
            if answer is not None:
                ids += CHAT.tool_answer(answer)
                messages.append({"role": "tool", "content": answer})
        assert ids == trace_ids(CHAT, trace)[0]


def test_the_template_renders_calls_and_neighbouring_tool_answers(
    tokenizer: transformers.PreTrainedTokenizerBase,
) -> None:
    calls = [{"type": "function", "function": {"name": "search", "arguments": {"query": q}}} for q in ("A", "B")]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        + tool_call("search", {"query": "A"})
        + "\n"
        + tool_call("search", {"query": "B"})
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_shipped_tokenizer_is_what_the_script_makes() -> None:
    made = json.loads(build_tokenizer(0).to_str())
    assert made == json.loads((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"))


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in Path(MODEL_DIR).iterdir()) < 1_600_000
