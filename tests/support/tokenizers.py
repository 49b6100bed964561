"""Small fast tokenizers for tests, built in memory: byte-level, with a few merges, with or without control tokens.

Invariant: equal arguments give the same tokenizer; every text can be encoded and comes back whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

QWEN_CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
PLAIN_TAGS_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_CORPUS = (
    '{"name": "calculator", "arguments": {"expression": "12*34"}}\n',
    "<|im_start|>user\nYou are a helpful assistant. What is 12 times 34?<|im_end|>\n",
    "<tool_call>\n</tool_call>\n<tool_response>\n</tool_response>\n<think>\n\n</think>\n\n",
    "word line of text naïve 你好 the and of system assistant tool\n\n",
)


@cache
def byte_level(control: Sequence[str] = QWEN_CONTROL, *, vocab: int = 420, special: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer whose ``control`` strings are added tokens.

    ``special=False`` is how Qwen has its tool tags: added, yet not "special", so that a tokenizer's own switch for
    special tokens does not cover them. The first three are always special.
    """
    tokenizer = Tokenizer(models.BPE())
    # As Qwen and GPT-4 split: letters, single digits, punctuation with line breaks, runs of white space.
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    from tokenizers import Regex

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=special or i < 3) for i, text in enumerate(control)]
    )
    return tokenizer
