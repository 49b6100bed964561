"""Owns the warm start: `python -m fermata_cli.demo.warm_start --out DIR --seed 0` makes the shipped model again.

First clean traces, until copying between question, calls and tool answers works; then a short phase of traces with
faults, so that the model that ships fails more often than not. Invariant: no held-out question and no name of the
corpus is ever trained on (names and codes are made up anew for each trace), and the same seed on the same machine gives
the same weights.
"""

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from fermata_cli.demo import CORPUS, EVAL_TASKS, MODEL_DIR
from fermata_cli.demo.chat import Chat
from fermata_cli.demo.questions import KINDS, held_out, make_name, make_question
from fermata_cli.demo.rehearsal import LocalTools, sample
from fermata_cli.demo.tokenizer import END, MAX_CONTEXT, PAD, VOCABULARY, write_tokenizer
from fermata_cli.demo.traces import Trace, clean_trace, faulty_trace, random_code
from tool_backend.search.corpus import read_corpus

BATCH = 16
# How many of the traces with faults have one. Longer solutions get fewer, because they have more places to go wrong at.
FAULTY_SHARE = {"one_call": 0.78, "two_calls": 0.65, "lookup": 0.8, "lookup_then_calculate": 0.72}


def model_config(chat: Chat) -> transformers.Qwen3Config:
    """The shape: 689,536 parameters, embeddings untied."""
    return transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=chat.control_id(END),
        pad_token_id=chat.control_id(PAD),
        architectures=["Qwen3ForCausalLM"],
    )


def trace_ids(chat: Chat, trace: Trace) -> tuple[list[int], list[bool]]:
    """The ids of a trace as the rollout node would make them, and which of them are the model's."""
    ids, own = list(chat.question(trace.question)), []
    own += [False] * len(ids)
    for text, answer in trace.turns:
        turn = chat.turn(text)
        given = [] if answer is None else chat.tool_answer(answer)
        ids += turn + given
        own += [True] * len(turn) + [False] * len(given)
    return ids, own


def make_trace(rng: random.Random, faulty: bool, known: Container[str]) -> Trace:
    """A trace about a question that is not held out; its name is none of the `known`, its code made up for it alone."""
    while True:
        kind = rng.choice(KINDS)
        question = make_question(rng, kind, make_name(rng) if kind.startswith("lookup") else None)
        if held_out(question) or question.name in known:
            continue
        code = random_code(rng, question)
        if faulty and rng.random() < FAULTY_SHARE[kind]:
            return faulty_trace(rng, question, code)
        return clean_trace(question, code)


def batch_loss(model: transformers.PreTrainedModel, chat: Chat, traces: Sequence[Trace]) -> torch.Tensor:
    """Mean cross-entropy over the model's own tokens. Rows are padded on the right, which a causal model cannot see."""
    encoded = [trace_ids(chat, trace) for trace in traces]
    length = max(len(ids) for ids, _ in encoded)
    ids_BT = torch.full((len(encoded), length), chat.control_id(PAD))
    own_BT = torch.zeros((len(encoded), length), dtype=torch.bool)
    for row, (ids, own) in enumerate(encoded):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        own_BT[row, : len(own)] = torch.tensor(own)
    hidden_BTH = model.model(input_ids=ids_BT[:, :-1]).last_hidden_state
    own_BT = own_BT[:, 1:]
    logits_NV = model.lm_head(hidden_BTH[own_BT])
    return torch.nn.functional.cross_entropy(logits_NV.float(), ids_BT[:, 1:][own_BT])


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training with its own traces and rates: `muon` for the layers' matrices, `adamw` for the rest."""

    name: str
    steps: int
    muon: float
    adamw: float
    first_turn_only: bool = False
    faulty: bool = False

    def trace(self, rng: random.Random, known: Container[str]) -> Trace:
        """The next trace to train on."""
        trace = make_trace(rng, self.faulty, known)
        return dataclasses.replace(trace, turns=((trace.turns[0][0], None),)) if self.first_turn_only else trace


def train(model: transformers.PreTrainedModel, chat: Chat, phase: Phase, seed: int) -> None:
    """Fresh traces every step; the rates rise over the first steps, then fall to a tenth along a cosine.

    Muon (Jordan et al. 2024) learns to copy in a third of the steps that AdamW needs alone.
    """
    rng = random.Random(f"{phase.name} {seed}")
    known = {document.title for document in read_corpus(CORPUS)}
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    optimizers = [
        torch.optim.Muon(matrices, lr=phase.muon, weight_decay=0.0),
        torch.optim.AdamW(others, lr=phase.adamw, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    warm_up = min(30, phase.steps // 4)
    schedules = [
        transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, warm_up, phase.steps, min_lr_rate=0.1)
        for optimizer in optimizers
    ]
    started, losses = time.monotonic(), []
    model.train()
    for step in range(1, phase.steps + 1):
        loss = batch_loss(model, chat, [phase.trace(rng, known) for _ in range(BATCH)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *schedules):
            each.step()
        model.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0 or step == phase.steps:
            mean = sum(losses[-50:]) / len(losses[-50:])
            say(f"{phase.name}: step {step} of {phase.steps}, loss {mean:.4f}, {time.monotonic() - started:.0f} s")
    model.eval()


PHASES = (
    Phase("clean first turns", steps=150, muon=0.02, adamw=3e-3, first_turn_only=True),
    Phase("clean traces", steps=500, muon=0.02, adamw=3e-3),
    Phase("faulty traces", steps=75, muon=1e-3, adamw=1e-3, faulty=True),
)


def load_tasks(path: Path, limit: int) -> list[dict[str, Any]]:
    """The first `limit` tasks of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:limit]]


def accuracy(
    model: transformers.PreTrainedModel,
    chat: Chat,
    *,
    temperature: float,
    tools: bool = True,
    limit: int = 400,
    seed: int = 0,
) -> dict[str, float]:
    """Share of held-out tasks answered exactly, per kind and for `all`."""
    tasks = load_tasks(EVAL_TASKS, limit)
    rollouts = sample(
        model,
        chat,
        [task["messages"][0]["content"] for task in tasks],
        LocalTools(CORPUS, available=tools),
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
    )
    right: dict[str, list[bool]] = {}
    for task, rollout in zip(tasks, rollouts, strict=True):
        for kind in (task["kind"], "all"):
            right.setdefault(kind, []).append(rollout.answer == task["answer"])
    return {kind: sum(values) / len(values) for kind, values in sorted(right.items())}


def say(text: str) -> None:
    """Progress goes to stderr."""
    print(text, file=sys.stderr, flush=True)


def report(model: transformers.PreTrainedModel, chat: Chat, what: str) -> None:
    """Print what the model can do on held-out tasks."""
    for how, temperature, tools in (("greedy", 0.0, True), ("sampled", 1.0, True), ("sampled, tools off", 1.0, False)):
        shares = accuracy(model, chat, temperature=temperature, tools=tools)
        say(f"{what}, {how}: " + ", ".join(f"{kind} {share:.3f}" for kind, share in shares.items()))


def warm_start(out: Path, seed: int) -> None:
    """Make the model folder `out`: tokenizer, chat template, configuration and weights in bfloat16."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the same weights however many cores there are
    torch.use_deterministic_algorithms(True)
    write_tokenizer(out, seed)
    chat = Chat(out)
    model = transformers.Qwen3ForCausalLM(model_config(chat))
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    for phase in PHASES:
        train(model, chat, phase, seed)
        if phase is PHASES[-2]:
            report(model, chat, f"after {phase.name}")
    model = model.to(torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=chat.end_id, pad_token_id=chat.control_id(PAD)
    )
    model.save_pretrained(out)
    report(model.float(), chat, "as shipped")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m fermata_cli.demo.warm_start", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="model folder to write (default: the shipped one)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes another model (default: 0)")
    arguments = parser.parse_args()
    warm_start(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
