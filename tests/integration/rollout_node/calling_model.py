"""A model folder that calls the tool `work` in every turn, whatever it is asked: real weights, known behaviour.

Attention and MLP add nothing to the residual stream, so the next token depends on the last one alone, and the head
holds one chain: line break → <tool_call> → the call → </tool_call> → <|im_end|>. Its logits lie so far above all others
that sampling at temperature 1 follows it too. Invariant: a turn is exactly `TURN_TOKENS` long.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tests.support.tiny_model import CHAT_TEMPLATE, CONTROL_TOKENS, TinyModel, make_model

CALL = '{"name": "work", "arguments": {}}'
TURN_TOKENS = 4  # <tool_call>, the call, </tool_call>, <|im_end|>


def build(folder: Path) -> Path:
    """Writes config, weights, tokenizer and chat template."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _save_tokenizer(folder)
    model = make_model(TinyModel(vocab=448, max_positions=4096))
    ids = {token: tokenizer.token_to_id(token) for token in CONTROL_TOKENS}
    chain = [
        tokenizer.encode("\n").ids[-1],
        ids["<tool_call>"],
        tokenizer.encode(CALL).ids[0],
        ids["</tool_call>"],
        ids["<|im_end|>"],
    ]
    assert len(set(chain)) == 5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        head.zero_()
        for last, following in itertools.pairwise(chain):
            head[following] += 10 * embedding[last] / embedding[last].norm()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2))
    return folder


def _save_tokenizer(folder: Path):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=440,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Nothing but the call to merge: it becomes one token.
    tokenizer.train_from_iterator([CALL] * 8, trainer)
    assert len(tokenizer.encode(CALL).ids) == 1
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return tokenizer
