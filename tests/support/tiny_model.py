"""A tiny random Qwen3 model folder for tests: `build(folder)` writes config, weights, tokenizer and chat template.

Invariant: the folder is a normal Hugging Face folder (transformers, vLLM and `renderers` load it as they load any Qwen3
model), and equal arguments give equal bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

# What the byte-level merges are learnt from: the texts that tests render again and again.
_CORPUS = (
    'user assistant system\n{"name": "calculator", "arguments": {"expression": "12*34"}}',
    '{"name": "search", "arguments": {"query": "the code of the made-up name", "top_k": 1}}',
    "You are a helpful assistant. Use the tools. What is 12 times 34? The answer is 408.",
)

# Qwen3's template without the reasoning parts: tools in the system turn, results as <tool_response> in a user turn.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True)
class TinyModel:
    """Shape of the model. The defaults make about 0.2 M parameters."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 128
    vocab: int = 384
    tied: bool = False
    seed: int = 0
    max_positions: int = 4096
    # Larger than the 0.02 of real models, so that greedy tokens vary and a wrong weight shows.
    init_std: float = 0.2


def build(folder: Path, spec: TinyModel | None = None) -> Path:
    """Writes the model folder (fp32 safetensors) and returns it; seconds, no network."""
    spec = spec or TinyModel()
    folder.mkdir(parents=True, exist_ok=True)
    _save_tokenizer(folder, spec)
    make_model(spec).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def make_model(spec: TinyModel):  # type: ignore[no-untyped-def]
    """The transformers model itself, fp32, in eval mode, seeded without touching torch's global generator."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=spec.tied,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        model = Qwen3ForCausalLM(config).to(torch.float32).eval()
        randomise(model, spec.seed, spec.init_std)
    return model


def randomise(model, seed: int, std: float = 0.2) -> None:  # type: ignore[no-untyped-def]
    """New random weights in place, norms near one: what a test sends as the next version."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(1.0 + noise if "norm" in name else noise)


def _save_tokenizer(folder: Path, spec: TinyModel) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # Digits are one token each, as in the models that this stands in for.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
