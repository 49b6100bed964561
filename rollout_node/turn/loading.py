"""From a model's folder (or Hugging Face name) to its TurnFormat.

Owns what is read from disk: tokenizer, chat template, stop tokens. Invariant: everything that is missing or cannot be
used is one TurnFormatError sentence that says what and where.
"""

import json
from pathlib import Path
from typing import Any

from rollout_node.turn.bridge import prove_bridge
from rollout_node.turn.format import TurnFormat, check_parser
from rollout_node.turn.known import KnownModel
from rollout_node.turn.prompt import TemplatePrompt, check_hermes, template_writes_hermes
from rollout_node.turn.records import TurnFormatError
from rollout_node.turn.stream import CLOSE, OPEN
from rollout_node.turn.template import ChatTemplate
from rollout_node.turn.vocabulary import Vocabulary

# Tokens that end a turn in templates whose configuration names only the end of a document.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|call|>", "<|observation|>")


def load_turn_format(model_path: str, *, renderer: str = "auto", parser: str = "hermes") -> TurnFormat:
    """``renderer``: "auto" (the library's renderer where it knows the model, else the chat template), "template", or
    the library's name of a renderer such as "qwen3". ``parser``: "hermes" wants the tags of a call to be control
    tokens of the tokenizer; "hermes-text" also takes a model that writes them as ordinary text."""
    check_parser(parser)
    tokenizer = _load_tokenizer(model_path)
    vocabulary = Vocabulary(tokenizer.backend_tokenizer)
    _check_ids_are_the_models(vocabulary, model_path)
    if parser == "hermes":
        _check_tags(vocabulary, model_path)
    name = known_renderer(model_path) if renderer == "auto" else renderer
    if name is not None and name != "template":
        return _by_renderer(vocabulary, name, model_path, tokenizer.eos_token_id)
    source = _template_source(tokenizer, model_path)
    stop_ids = _stop_ids(tokenizer, vocabulary, source, model_path)
    template = ChatTemplate(source, {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)})
    try:
        bridge = prove_bridge(template, vocabulary, frozenset(stop_ids))
        template_writes_hermes(template, vocabulary, stop_ids)
    except TurnFormatError as error:
        raise TurnFormatError(f"model {model_path}: {error}") from error
    return TurnFormat(
        vocabulary,
        prompt=TemplatePrompt(template, vocabulary),
        bridge=bridge,
        stop_token_ids=stop_ids,
        template_hash=template.hash,
        route="template",
    )


def known_renderer(model_path: str) -> str | None:
    """The library's renderer for a model by its Hugging Face name; fine-tunes and folders have none on purpose."""
    from renderers.base import MODEL_RENDERER_MAP

    name: str | None = MODEL_RENDERER_MAP.get(model_path)
    return name


def _by_renderer(vocabulary: Vocabulary, name: str, model_path: str, eos_token_id: int | None) -> TurnFormat:
    try:
        known = KnownModel(vocabulary, name, model_path, eos_token_id)
        check_hermes(vocabulary, known.stop_token_ids, *known.example_turn())
    except TurnFormatError as error:
        raise TurnFormatError(f"model {model_path}: {error}") from error
    return TurnFormat(
        vocabulary,
        prompt=known,
        bridge=known.bridge,
        stop_token_ids=known.stop_token_ids,
        template_hash=known.hash,
        route=f"renderers:{name}",
    )


def _load_tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    if model_path.startswith((".", "/", "~")) and not Path(model_path).expanduser().is_dir():
        raise TurnFormatError(f"there is no model folder at {model_path}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(Path(model_path).expanduser()) if model_path[:1] in "./~" else model_path
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TurnFormatError(f"no tokenizer can be loaded from {model_path}: {first}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise TurnFormatError(f"model {model_path} has no fast tokenizer (tokenizer.json); exact ids need one")
    return tokenizer


def _check_ids_are_the_models(vocabulary: Vocabulary, model_path: str) -> None:
    """A control token that was added to the tokenizer alone has no embedding: the engine would die of its id."""
    path = Path(model_path).expanduser() / "config.json"
    config = _json_object(path) if path.is_file() else {}
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(size, int):
        return
    for token, token_id in sorted(vocabulary.control.items(), key=lambda item: item[1]):
        if token_id >= size:
            raise TurnFormatError(
                f"model {model_path}: its tokenizer gives {token!r} the id {token_id}, and the model knows the ids 0 "
                f"to {size - 1} ({path}): resize its embeddings and train the token, or take it out of the tokenizer"
            )


def _check_tags(vocabulary: Vocabulary, model_path: str) -> None:
    """Calls read from ordinary text are easily confused with data: that has to be asked for."""
    missing = [tag for tag in (OPEN, CLOSE) if vocabulary.token_id(tag) is None]
    if missing:
        raise TurnFormatError(
            f"model {model_path}: its tokenizer has no control token {' and no '.join(missing)}, by which calls are "
            'read; add it and train it, or set rollout.parser to "hermes-text" for a model that writes the tags as text'
        )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TurnFormatError(f"{path} is not a JSON object: {error}") from error
    if not isinstance(read, dict):
        raise TurnFormatError(f"{path} is not a JSON object")
    return read


def _template_source(tokenizer: Any, model_path: str) -> str:
    source = tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get("tool_use") or source.get("default")
    if not isinstance(source, str) or not source:
        raise TurnFormatError(
            f"model {model_path} has no chat template; put one into chat_template.jinja in the model's folder"
        )
    return source


def _stop_ids(tokenizer: Any, vocabulary: Vocabulary, source: str, model_path: str) -> list[int]:
    found: list[int] = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for file in ("generation_config.json", "config.json"):
        path = Path(model_path).expanduser() / file
        if path.is_file():
            eos = _json_object(path).get("eos_token_id")
            named = [eos] if isinstance(eos, int) else list(eos or [])
            for token_id in named:
                if token_id not in vocabulary.control_ids:
                    raise TurnFormatError(
                        f"{path} has the eos_token_id {token_id}, which is the ordinary text "
                        f"{vocabulary.decode([token_id])!r}; it must be a control token of the tokenizer"
                    )
            found += named
    found += [vocabulary.control[token] for token in _TURN_ENDS if token in vocabulary.control and token in source]
    if not found:
        raise TurnFormatError(f"model {model_path} names no stop token; set eos_token in tokenizer_config.json")
    return list(dict.fromkeys(found))
