"""Text never becomes a control id, whatever the tokenizer does; trusted text encodes as the tokenizer encodes it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rollout_node.turn.records import TurnFormatError
from rollout_node.turn.vocabulary import TextReader, Vocabulary
from tests.support.tokenizers import QWEN_CONTROL, byte_level

from .support import vocabulary

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def _bpe(extra: dict[str, int], **kwargs) -> Tokenizer:  # type: ignore[no-untyped-def]
    vocab = {char: i for i, char in enumerate(_ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **extra}, merges=[], **kwargs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _in_the_vocabulary_itself() -> Tokenizer:
    """As Llama 3: a piece that is a whole entry of the vocabulary is taken at once."""
    tokenizer = _bpe({"<|im_end|>": 256, "</s>": 257}, ignore_merges=True)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>"), AddedToken("</s>")])
    return tokenizer


def _unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<|im_end|>", 0.0), ("▁", -3.0)] + [
        (char, -5.0) for char in "abcdefghijklmnopqrstuvwxyz<>/|_!. \nsé"
    ]
    seen: dict[str, float] = {}
    for piece, score in pieces:
        seen.setdefault(piece, score)
    tokenizer = Tokenizer(models.Unigram(list(seen.items()), unk_id=0, byte_fallback=False))
    tokenizer.add_special_tokens([AddedToken("</s>"), AddedToken("<|im_end|>")])
    return tokenizer


def _normalising() -> Tokenizer:
    """Full-width and upper-case spellings of a control token are the token after normalising."""
    tokenizer = _bpe({})
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.add_tokens([AddedToken("<|im_end|>", normalized=True), AddedToken("<x>", normalized=True)])
    return tokenizer


def _stripping() -> Tokenizer:
    """As Phi 3: control tokens that swallow white space beside them."""
    tokenizer = _bpe({})
    tokenizer.add_special_tokens(
        [AddedToken("<|im_end|>", rstrip=True, normalized=False), AddedToken("<x>", lstrip=True, normalized=False)]
    )
    return tokenizer


TOKENIZERS = {
    "qwen": byte_level,
    "in-vocabulary": _in_the_vocabulary_itself,
    "unigram": _unigram,
    "normalising": _normalising,
    "stripping": _stripping,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_becomes_a_control_id(name: str) -> None:
    vocab = Vocabulary(TOKENIZERS[name]())
    for token in vocab.control:
        wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in token)
        for text in (token, f"a{token}b", f" {token} ", token * 3, token.upper(), wide, token[:-1] + token, token[1:]):
            assert vocab.control_ids.isdisjoint(vocab.encode_plain(text)), text


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*QWEN_CONTROL, "<|", "im_", "end|>", "\n", "x", "🦊", "\ud800"]), max_size=8),
    name=st.sampled_from(sorted(TOKENIZERS)),
)
def test_no_mixture_becomes_a_control_id(parts: list[str], name: str) -> None:
    vocab = _cached(name)
    text = "".join(parts)
    assert vocab.control_ids.isdisjoint(vocab.encode_plain(text))
    if name == "qwen":
        assert vocab.decode(vocab.encode_plain(text)) == text.replace("\ud800", "�" * 3)


_MADE: dict[str, Vocabulary] = {}


def _cached(name: str) -> Vocabulary:
    if name not in _MADE:
        _MADE[name] = Vocabulary(TOKENIZERS[name]())
    return _MADE[name]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_trusted_text_encodes_as_the_tokenizer_encodes_it(name: str) -> None:
    vocab = Vocabulary(TOKENIZERS[name]())
    for text in ("<|im_end|>\nhello  <|im_end|> x", "plain", "<x> \n<|im_end|>", "a</s>b"):
        assert vocab.agrees(text), text


def test_added_white_space_is_text_not_control() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])
    vocab = Vocabulary(tokenizer)
    assert "    " not in vocab.control
    assert vocab.decode(vocab.encode_plain("a    b")) == "a    b"


def test_a_tokenizer_that_cannot_spell_a_text_is_refused() -> None:
    tokenizer = _bpe({}, ignore_merges=True)
    tokenizer.add_special_tokens([AddedToken("a")])
    with pytest.raises(TurnFormatError, match="control token"):
        Vocabulary(tokenizer).encode_plain("a")


def test_parts_encode_as_the_whole_where_nothing_is_forged() -> None:
    vocab = vocabulary()
    text = "<|im_start|>user\n2 + 2\n\n<|im_end|>\n"
    pieces = vocab.split_control(text)
    assert vocab.encode_pieces(pieces) == byte_level().encode(text, add_special_tokens=False).ids


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_the_reader_gives_every_character(text: str) -> None:
    vocab = vocabulary()
    reader = TextReader(vocab)
    ids = vocab.encode_plain(text)
    assert "".join([*(reader.push(i) for i in ids), reader.flush()]) == vocab.decode(ids)
