"""What the tests of this package share: tokenizers, templates and case folders."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from rollout_node.turn import ToolDefinition, ToolSet, TurnFormat
from rollout_node.turn.vocabulary import Vocabulary
from tests.support.tokenizers import PLAIN_TAGS_CONTROL, QWEN_CONTROL, byte_level

ROOT = Path(__file__).parents[4]
OWN = ROOT / "tests" / "cases"
SHARED = ROOT.parent / "shared"

CASE_FOLDERS = [OWN] + ([SHARED / "cases"] if (SHARED / "cases").is_dir() else [])
SHARED_TEMPLATES = sorted((SHARED / "chat_templates").glob("*.jinja")) if SHARED.is_dir() else []
OWN_TEMPLATES = sorted((OWN / "chat_templates").glob("*.jinja"))

_CONTROL = re.compile(
    r"<[|｜][^<>|｜\s]*[|｜]>|\[gMASK\]|<sop>|</?(?:think|tool_call|tool_response|arg_key|arg_value)>"
)
_STOPS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<｜end▁of▁sentence｜>",
    "<|call|>",
    "<|observation|>",
    "<|user|>",
    "<|endoftext|>",
)


@cache
def vocabulary(kind: str = "tags") -> Vocabulary:
    """ "tags": the hermes tags are control tokens; "text": they are plain text."""
    return Vocabulary(byte_level(QWEN_CONTROL if kind == "tags" else PLAIN_TAGS_CONTROL))


@cache
def vocabulary_for(path: Path) -> Vocabulary:
    """A tokenizer that has every control token which the template's source names."""
    named = sorted(set(_CONTROL.findall(path.read_text(encoding="utf-8"))) - {"<|endoftext|>"})
    return Vocabulary(byte_level(("<|endoftext|>", *named)))


def stop_tokens(vocab: Vocabulary) -> list[str]:
    return [token for token in _STOPS if token in vocab.control]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@cache
def tool_set() -> ToolSet:
    entries = json.loads((OWN / "tools.json").read_text(encoding="utf-8"))
    return ToolSet({entry["name"]: ToolDefinition.from_mapping(entry) for entry in entries})


@cache
def qwen_like(kind: str = "tags") -> TurnFormat:
    control = QWEN_CONTROL if kind == "tags" else PLAIN_TAGS_CONTROL
    source = (OWN / "chat_templates" / "qwen_like.jinja").read_text(encoding="utf-8")
    return TurnFormat.from_template(byte_level(control), source, stop_tokens=["<|im_end|>", "<|endoftext|>"])


def output_bytes(row: dict[str, Any]) -> bytes:
    if "output_hex" in row:
        return bytes.fromhex(row["output_hex"])
    if "output_repeat" in row:
        text, times = row["output_repeat"]
        return text.encode() * times
    return row["output"].encode()
