"""Owns the demo's tokenizer: a byte-level BPE of 384 tokens, seven of them control tokens, trained on the demo's text.

Invariant: letters, digits, line ends and the rest never merge with each other. So a name has the same ids after a
space, a quote or a line end, every digit is one token, and a text cut at such borders has the same ids as the whole.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fermata_cli.demo.questions import KINDS, SYLLABLES, make_code, make_name, make_question
from fermata_cli.demo.traces import clean_trace

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (PAD, START, END, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY = 384
MAX_CONTEXT = 4096

# Runs of letters, single digits, line ends and operators, runs of anything else. A pattern that ties a space to the
# word after it, as most do, would spell a name one way in the question and another in the JSON of the call.
_PATTERN = r"\p{L}+|\d|\n|[-+*/()]|[^\p{L}\d\n+*/()-]+"

_TEMPLATE = """\
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {%- set call = tool_call.function or tool_call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def _sample_texts(seed: int, count: int = 4000) -> Iterator[str]:
    rng = random.Random(f"fermata demo tokenizer {seed}")
    for syllable in SYLLABLES:  # alone and often, so that each becomes one token: a name is then three tokens to copy
        yield "\n".join((syllable, syllable.capitalize()) * count)
    yield "\n".join(("no results",) * count)
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        name = make_name(rng) if kind.startswith("lookup") else None
        trace = clean_trace(make_question(rng, kind, name), make_code(rng) if name else None)
        yield "\n".join(("user", trace.question, "assistant", *(part for turn in trace.turns for part in turn if part)))


def build_tokenizer(seed: int) -> tokenizers.Tokenizer:
    """Train the tokenizer on sample traces of made-up questions."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        # Special, so that `split_special_tokens` keeps every one of them plain text where the text is not trusted.
        special_tokens=[tokenizers.AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    controls = set(CONTROL_TOKENS)
    texts = (line for text in _sample_texts(seed) for line in text.splitlines() if line not in controls)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(folder: Path, seed: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` as `AutoTokenizer` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(seed).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [token for token in CONTROL_TOKENS if token not in (PAD, END)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
