"""A tokenizer seen as two parts: its control tokens, and plain text that can never become one.

Owns encoding and decoding. Invariant: ``encode_plain`` gives no control id whatever the text; a control id comes only
from trusted text, where the tokenizer itself finds the control token.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from rollout_node.turn.records import TurnFormatError


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in rendered text where an untrusted text goes."""

    index: int


# Encoding does not run over this place (a renderer encoded the two sides apart).
CUT = Slot(-1)

# Rendered text in parts: a control id, plain text, or a slot.
Piece = int | str | Slot


class Vocabulary:
    """``tokenizer`` is the fast tokenizer as the model's folder has it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = False
        serialised = self._tokenizer.to_str()
        self.hash = hashlib.sha256(serialised.encode()).hexdigest()
        added = self._tokenizer.get_added_tokens_decoder()
        # Runs of white space that some tokenizers add are ordinary text. Everything else that was added is control:
        # "special" says only what decoding skips (Qwen's <tool_call> is not special).
        self.control: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special or token.content.strip()
        }
        self.control_ids: frozenset[int] = frozenset(self.control.values())
        self._names = {token_id: content for content, token_id in self.control.items()}
        self._plain = self._without_control(json.loads(serialised), {t.content: i for i, t in added.items()})
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def _without_control(self, description: dict[str, object], added: dict[str, int]) -> Tokenizer:
        """The same tokenizer without its control tokens: built once, so that plain text cannot match any."""
        entries = description["added_tokens"]
        assert isinstance(entries, list)
        kept = [entry for entry in entries if entry["content"] not in self.control]
        for attempt in (kept, []):
            # A post-processor may name control tokens; it only adds special tokens, which we never ask for.
            plain = Tokenizer.from_str(
                json.dumps(
                    {
                        **description,
                        "added_tokens": attempt,
                        "post_processor": None,
                        "pre_tokenizer": _never_first(description.get("pre_tokenizer")),
                    }
                )
            )
            if all(plain.token_to_id(entry["content"]) == added[entry["content"]] for entry in attempt):
                break
        return plain

    def token_id(self, token: str) -> int | None:
        """The id of a control token, None where the tokenizer has none of that name."""
        return self.control.get(token)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of untrusted text, none of them a control id."""
        if not text:
            return []
        text = _utf8_able(text)
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self.control_ids.isdisjoint(ids):
            return ids
        return self._broken_up(text, ids, encoding.offsets)

    def _broken_up(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> list[int]:
        """The vocabulary itself holds the control token's text (Unigram, ignore_merges): spell it in two parts."""
        out: list[int] = []
        for token_id, (start, end) in zip(ids, offsets, strict=True):
            if token_id not in self.control_ids:
                out.append(token_id)
                continue
            if end - start < 2:
                raise TurnFormatError(
                    f"the tokenizer encodes the text {text[start:end]!r} as its control token {token_id}; "
                    "a tokenizer that can spell every text without control tokens is needed"
                )
            middle = (start + end) // 2
            out += self.encode_plain(text[start:middle]) + self.encode_plain(text[middle:end])
        return out

    def split_control(self, text: str) -> list[Piece]:
        """Trusted text as control ids and the plain text between them, found as the tokenizer itself finds them."""
        pieces: list[Piece] = []
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        position = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # A normaliser may turn other characters into a control token's; the template spells its own exactly.
            if token_id in self.control_ids and text[start:end].strip() == self._names[token_id].strip():
                if start > position:
                    pieces.append(text[position:start])
                pieces.append(token_id)
                position = max(position, end)
        if position < len(text):
            pieces.append(text[position:])
        return pieces

    def encode_pieces(self, pieces: Iterable[Piece], texts: Sequence[str] = ()) -> list[int]:
        """Ids of parts; neighbouring plain parts are encoded in one pass, as the tokenizer would have done."""
        out: list[int] = []
        run: list[str] = []
        for piece in pieces:
            if isinstance(piece, int) or piece == CUT:
                out += self.encode_plain("".join(run))
                run.clear()
                if isinstance(piece, int):
                    out.append(piece)
            else:
                run.append(texts[piece.index] if isinstance(piece, Slot) else piece)
        return out + self.encode_plain("".join(run))

    def agrees(self, text: str) -> bool:
        """Whether encoding this trusted text in parts gives what the tokenizer gives for the whole of it."""
        whole: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self.encode_trusted(text) == whole

    def encode_trusted(self, text: str) -> list[int]:
        """Ids of the template's own text, control tokens and all."""
        return self.encode_pieces(self.split_control(text))

    def plain_spans(self, text: str) -> list[tuple[int, int]]:
        """Character span of each token of ``encode_plain`` (where no control text had to be broken up)."""
        return self._plain.encode(_utf8_able(text), add_special_tokens=False).offsets

    def decode(self, ids: Sequence[int]) -> str:
        """The text that the ids spell, control tokens by their names."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False) if len(ids) else ""


class TextReader:
    """Decodes ids one at a time; gives text as soon as it is whole (a character may take several ids).

    The work for each id is bounded, and what comes out does not depend on how the ids were grouped.
    """

    _WINDOW = 8  # ids that one character may take before it is given up as broken bytes

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._context: list[int] = []  # given out already; keeps word-initial spaces right
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith("�") and len(self._held) < self._WINDOW:
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What is still held, as it is."""
        text = self._give(self._new_text()) if self._held else ""
        self._context = []
        return text

    def _new_text(self) -> str:
        before = self._vocabulary.decode(self._context)
        after = self._vocabulary.decode(self._context + self._held)
        return after[len(before) :] if after.startswith(before) else self._vocabulary.decode(self._held)

    def _give(self, text: str) -> str:
        self._context = self._held[-4:]
        self._held = []
        return text


def _never_first(pre_tokenizer: Any) -> Any:
    """Metaspace marks the first word of a whole text; our parts lie behind control tokens, so none of them is first."""
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    changed = dict(pre_tokenizer)
    if changed.get("type") == "Metaspace" and changed.get("prepend_scheme") == "first":
        changed["prepend_scheme"] = "never"
    if isinstance(changed.get("pretokenizers"), list):
        changed["pretokenizers"] = [_never_first(entry) for entry in changed["pretokenizers"]]
    return changed


def _utf8_able(text: str) -> str:
    """Lone surrogates cannot be encoded: they become replacement characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text
