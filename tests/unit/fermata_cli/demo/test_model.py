"""The shipped model: its shape, what it can do with and without tools, and that the rehearsal keeps exact ids."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from fermata_cli.demo import CORPUS, MODEL_DIR
from fermata_cli.demo.chat import Chat
from fermata_cli.demo.make_tasks import fact
from fermata_cli.demo.questions import KINDS, held_out, make_code, make_name, make_question
from fermata_cli.demo.rehearsal import MAX_TOKENS, LocalTools, sample
from fermata_cli.demo.traces import FAULTS, clean_trace
from fermata_cli.demo.warm_start import accuracy, batch_loss, make_trace, trace_ids

CHAT = Chat(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


def test_the_shape(model: transformers.PreTrainedModel) -> None:
    assert sum(p.numel() for p in model.parameters()) == 689_536
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not model.config.tie_word_embeddings
    assert model.config.eos_token_id == CHAT.end_id
    assert model.generation_config.eos_token_id in (CHAT.end_id, [CHAT.end_id])
    assert json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"


@pytest.mark.timeout(180)
def test_it_mostly_fails_with_tools_and_always_without(model: transformers.PreTrainedModel) -> None:
    torch.set_num_threads(1)
    assert 0.15 <= accuracy(model, CHAT, temperature=1.0, limit=100)["all"] <= 0.4
    assert accuracy(model, CHAT, temperature=1.0, limit=100, tools=False)["all"] <= 0.1


def test_sampling_keeps_exact_ids_and_logprobs(model: transformers.PreTrainedModel) -> None:
    questions = ["What is 12*34?", "What is (12*34)-5?", "What is the code of Nobody?", "What is 999-11?"] * 4
    rollouts = sample(
        model, CHAT, questions, LocalTools(CORPUS), temperature=1.0, generator=torch.Generator().manual_seed(3)
    )
    for rollout, question in zip(rollouts, questions, strict=True):
        assert rollout.ids[: len(CHAT.question(question))] == CHAT.question(question)
        assert len(rollout.ids) == len(rollout.sampled) == len(rollout.logprobs)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([rollout.ids])).logits[0, :-1]
        again = torch.log_softmax(logits, -1).gather(1, torch.tensor(rollout.ids[1:])[:, None])[:, 0].tolist()
        for position, sampled in enumerate(rollout.sampled[1:]):
            if sampled:
                assert again[position] == pytest.approx(rollout.logprobs[position + 1], abs=1e-4)


def test_the_local_tools_answer_each_call_of_a_trace_as_the_trace_says(tmp_path: Path) -> None:
    rng = random.Random(2)
    for i in range(300):
        kind = KINDS[i % 4]
        name = make_name(rng) if kind.startswith("lookup") else None
        code = make_code(rng) if name else None
        corpus = tmp_path / "corpus.jsonl"
        corpus.write_text(json.dumps({"id": "1", **fact(name or "Nobody", code or 0)}), encoding="utf-8")
        question = make_question(rng, kind, name)
        tools = LocalTools(corpus)
        for trace in (clean_trace(question, code), *(fault(rng, question, code) for fault in FAULTS)):
            assert trace.question == question.text
            for text, answer in trace.turns:
                assert tools.answer(text) == answer


def test_tools_that_are_off_or_called_badly_answer_with_a_sentence() -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    assert LocalTools(CORPUS).answer(call) == "2"
    assert LocalTools(CORPUS, available=False).answer(call) == "no tool named 'calculator' is available"
    assert "at most 1 operator" in LocalTools(CORPUS).answer(call.replace("1+1", "1+1+1"))
    for broken in ("<tool_call>", "<tool_call>\n[]\n</tool_call>", "<tool_call>\n{\n</tool_call>"):
        assert LocalTools(CORPUS).answer(broken) == "the call must be a JSON object with a name and arguments"


def test_warm_start_traces_fit_and_touch_nothing_held_out() -> None:
    rng = random.Random(6)
    lengths = [len(trace_ids(CHAT, make_trace(rng, i % 2 == 1, known={"Bogavi"}))[0]) for i in range(1000)]
    assert max(lengths) < 140 < MAX_TOKENS
    for i in range(400):
        kind = KINDS[i % 4]
        question = make_question(rng, kind, make_name(rng) if kind.startswith("lookup") else None)
        if held_out(question):
            assert all(make_trace(rng, False, known=()).question != question.text for _ in range(3))


def test_only_the_models_own_tokens_are_trained(model: transformers.PreTrainedModel) -> None:
    rng = random.Random(7)
    traces = [make_trace(rng, False, known=()) for _ in range(3)]
    with torch.no_grad():
        loss = batch_loss(model, CHAT, traces)
        total, count = 0.0, 0
        for ids, own in (trace_ids(CHAT, trace) for trace in traces):
            logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
            for at in range(1, len(ids)):
                if own[at]:
                    total -= logprobs[at - 1, ids[at]].item()
                    count += 1
    assert loss.item() == pytest.approx(total / count, rel=1e-4)
