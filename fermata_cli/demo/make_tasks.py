"""Owns the shipped tasks and the corpus: `python -m fermata_cli.demo.make_tasks --out DIR --seed 0` makes them again.

Invariant: no evaluation question, and no name asked for in evaluation, occurs in the training tasks
(`questions.held_out`); each name is in the corpus once; each answer follows from exact arithmetic and the corpus.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from fermata_cli.demo import HERE
from fermata_cli.demo.questions import KINDS, Question, held_out, make_code, make_name, make_question

NAMES = 800
TRAIN_PER_KIND = 400
EVAL_PER_KIND = 100
TOOLS = ("calculator", "search")


def make_corpus(rng: random.Random) -> dict[str, int]:
    """Made-up names and their codes, in a random order."""
    codes: dict[str, int] = {}
    while len(codes) < NAMES:
        codes.setdefault(make_name(rng), make_code(rng))
    return codes


def fact(name: str, code: int) -> dict[str, str]:
    """One document of the corpus, less its id. The search tool answers with `title: text`."""
    return {"title": name, "text": f"the code of {name} is {code}"}


def make_questions(rng: random.Random, codes: dict[str, int], *, evaluation: bool, per_kind: int) -> list[Question]:
    """`per_kind` different questions of each kind from one side of the split, mixed."""
    chosen: dict[str, Question] = {}
    names = [name for name in codes if held_out(Question("lookup", name, (), ())) == evaluation]
    for kind in KINDS:
        fresh = iter(rng.sample(names, len(names)))  # names without repetition as long as they last
        wanted = len(chosen) + per_kind
        while len(chosen) < wanted:
            name = next(fresh) if kind.startswith("lookup") else None
            question = make_question(rng, kind, name)
            if held_out(question) == evaluation:
                chosen.setdefault(question.text, question)
    questions = list(chosen.values())
    rng.shuffle(questions)
    return questions


def task(number: int, prefix: str, question: Question, codes: dict[str, int]) -> dict[str, object]:
    """One line of a task file."""
    return {
        "id": f"{prefix}-{number:04d}",
        "messages": [{"role": "user", "content": question.text}],
        "tools": list(TOOLS),
        "answer": str(question.answer(codes.get(question.name) if question.name else None)),
        "kind": question.kind,
    }


def write_jsonl(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make(out: Path, seed: int) -> None:
    """Write `corpus.jsonl`, `tasks/train.jsonl` and `tasks/eval.jsonl` under `out`."""
    rng = random.Random(f"fermata demo tasks {seed}")
    codes = make_corpus(rng)
    write_jsonl(
        out / "corpus.jsonl", ({"id": f"fact-{i:04d}", **fact(*item)} for i, item in enumerate(codes.items(), start=1))
    )
    for prefix, evaluation, per_kind in (("train", False, TRAIN_PER_KIND), ("eval", True, EVAL_PER_KIND)):
        questions = make_questions(rng, codes, evaluation=evaluation, per_kind=per_kind)
        rows = (task(i, prefix, question, codes) for i, question in enumerate(questions, start=1))
        write_jsonl(out / "tasks" / f"{prefix}.jsonl", rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m fermata_cli.demo.make_tasks", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to (default: the shipped one)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other tasks (default: 0)")
    arguments = parser.parse_args()
    make(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
