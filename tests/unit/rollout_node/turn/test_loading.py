"""A model's folder to its TurnFormat; what is missing is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_node.turn import Message, ToolAnswer, TurnFormatError, load_turn_format
from rollout_node.turn.check import check_cases
from tests.support.tokenizers import QWEN_CONTROL, byte_level

from .support import OWN, qwen_like, tool_set


def folder(path: Path, *, template: str | None = "qwen_like", control: tuple[str, ...] = QWEN_CONTROL) -> Path:
    byte_level(control).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    ids = [byte_level(control).token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": ids[0]}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[2], ids[0]]}))
    if template is not None:
        source = (OWN / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")
        (path / "chat_template.jinja").write_text(source)
    return path


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    form = load_turn_format(str(folder(tmp_path)))
    vocab = form.vocabulary
    assert form.route == "template"
    assert form.stop_token_ids[0] == vocab.control["<|im_end|>"]
    assert form.stop_token_ids == (vocab.control["<|im_end|>"], vocab.control["<|endoftext|>"])
    messages = [Message("user", "12*34?")]
    expected = qwen_like()
    assert vocab.decode(form.render_prompt(messages)) == expected.vocabulary.decode(expected.render_prompt(messages))
    stream = form.stream(tool_set(), form.render_prompt(messages))
    ids = vocab.encode_trusted('<tool_call>\n{"name": "now"}\n</tool_call><|im_end|>')
    assert [call.name for call in stream.feed(ids)] == ["now"]
    assert form.render_results(ids, [ToolAnswer("k", b"12:00")], 100)[0].call_key == "k"
    again = load_turn_format(str(tmp_path))
    assert (again.tokenizer_hash, again.template_hash) == (form.tokenizer_hash, form.template_hash)


def test_cases_can_be_checked_with_a_model(tmp_path: Path) -> None:
    results = check_cases(OWN / "tools.json", OWN / "turns.jsonl", model_path=str(folder(tmp_path)))
    assert all(result.passed for result in results)


def test_the_library_s_renderer_can_be_named(tmp_path: Path) -> None:
    assert load_turn_format(str(folder(tmp_path, template=None)), renderer="qwen3").route == "renderers:qwen3"


@pytest.mark.parametrize(
    ("template", "options", "says"),
    [
        (None, {}, "has no chat template"),
        ("rewrites_history", {}, "it rewrites the turn once an answer follows"),
        ("qwen_like", {"parser": "xml"}, "there is no parser 'xml'"),
        ("qwen_like", {"renderer": "glm-5"}, "renderer 'glm-5' cannot be used"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, template: str | None, options: dict[str, str], says: str
) -> None:
    with pytest.raises(TurnFormatError) as caught:
        load_turn_format(str(folder(tmp_path, template=template)), **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_stop_token_that_is_ordinary_text_is_one_sentence(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    with pytest.raises(TurnFormatError, match="must be a control token"):
        load_turn_format(str(path))


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TurnFormatError, match="no model folder at"):
        load_turn_format(str(tmp_path / "nothing"))
    with pytest.raises(TurnFormatError, match="no tokenizer can be loaded"):
        load_turn_format(str(tmp_path))


def test_importing_needs_no_torch_vllm_or_transformers() -> None:
    heavy = ("torch", "vllm", "transformers", "renderers")
    code = f"import rollout_node.turn, rollout_node.turn.check, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("nested", [False, True])
def test_a_control_token_beyond_the_models_embeddings_is_one_sentence(tmp_path: Path, nested: bool) -> None:
    path = folder(tmp_path)
    last = max(byte_level(QWEN_CONTROL).get_vocab().values())
    for size, fits in ((last + 1, True), (last, False)):
        sized = {"vocab_size": size}
        config = {"model_type": "qwen3", **({"text_config": sized} if nested else sized)}
        (path / "config.json").write_text(json.dumps(config))
        if fits:
            load_turn_format(str(path))
            continue
        with pytest.raises(TurnFormatError, match=f"the id {last}, and the model knows the ids 0 to {size - 1}"):
            load_turn_format(str(path))


@pytest.mark.parametrize("text", ["[]", "{", "1"])
def test_a_config_that_is_no_object_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = folder(tmp_path)
    (path / "generation_config.json").write_text(text)
    with pytest.raises(TurnFormatError, match=r"generation_config\.json is not a JSON object"):
        load_turn_format(str(path))


@pytest.mark.parametrize("missing", [("<tool_call>",), ("</tool_call>",), ("<tool_call>", "</tool_call>")])
def test_a_model_whose_tags_are_no_control_tokens_has_to_be_asked_for(tmp_path: Path, missing: tuple[str, ...]) -> None:
    path = folder(tmp_path, control=tuple(token for token in QWEN_CONTROL if token not in missing))
    with pytest.raises(TurnFormatError) as caught:
        load_turn_format(str(path))
    assert all(f"no {tag}" in str(caught.value) or f"token {tag}" in str(caught.value) for tag in missing)
    assert "hermes-text" in str(caught.value)
    form = load_turn_format(str(path), parser="hermes-text")
    ids = form.vocabulary.encode_trusted('<tool_call>\n{"name": "now"}\n</tool_call>')
    stream = form.stream(tool_set())
    assert [call.name for call in [*stream.feed(ids), *stream.finish("stop").calls]][:1] == ["now"]
