"""The shipped tasks: right answers, nothing held out in training, every name in the corpus, made again byte by byte."""

import collections
import json
import random
import re
from pathlib import Path

import pytest

from fermata_cli.demo import CORPUS, EVAL_TASKS, HERE, TRAIN_TASKS
from fermata_cli.demo.make_tasks import make
from fermata_cli.demo.questions import KINDS, Question, held_out, make_code, make_name, make_operand, make_question
from tool_backend.calculator.tool import calculate

NAME = re.compile(r"the code of ([A-Z][a-z]+)")
WORDS = {"plus": "+", "minus": "-", "times": "*"}


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def codes() -> dict[str, str]:
    documents = read(CORPUS)
    found = {d["title"]: d["text"].removeprefix(f"the code of {d['title']} is ") for d in documents}
    assert len(found) == len(documents) == len({d["id"] for d in documents})
    return found


def content(task: dict) -> str:
    (message,) = task["messages"]
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize("path", [TRAIN_TASKS, EVAL_TASKS], ids=["train", "eval"])
def test_answers_follow_from_exact_arithmetic_and_the_corpus(path: Path, codes: dict[str, str]) -> None:
    for task in read(path):
        text = content(task).removeprefix("What is ").removesuffix("?")
        expression = NAME.sub(lambda match: codes[match[1]], text)
        for word, operator in WORDS.items():
            expression = expression.replace(f" {word} ", operator)
        assert calculate(expression) == task["answer"], task
        assert str(int(task["answer"])) == task["answer"]
        assert task["tools"] == ["calculator", "search"]


@pytest.mark.parametrize(("path", "per_kind"), [(TRAIN_TASKS, 400), (EVAL_TASKS, 100)], ids=["train", "eval"])
def test_every_kind_equally_often_and_no_question_twice(path: Path, per_kind: int) -> None:
    tasks = read(path)
    assert collections.Counter(task["kind"] for task in tasks) == dict.fromkeys(KINDS, per_kind)
    assert len({content(task) for task in tasks}) == len({task["id"] for task in tasks}) == len(tasks)


def test_nothing_held_out_is_in_training() -> None:
    train, evaluation = read(TRAIN_TASKS), read(EVAL_TASKS)
    assert not {content(task) for task in train} & {content(task) for task in evaluation}
    names = [{match[1] for task in tasks if (match := NAME.search(content(task)))} for tasks in (train, evaluation)]
    assert len(names[1]) >= 100
    assert not names[0] & names[1], "a code asked for in evaluation must not be seen in training"


def test_the_shipped_files_are_what_the_script_makes(tmp_path: Path) -> None:
    make(tmp_path, 0)
    for path in (CORPUS, TRAIN_TASKS, EVAL_TASKS):
        assert (tmp_path / path.relative_to(HERE)).read_bytes() == path.read_bytes(), path.name


def test_another_seed_never_moves_a_question_across_the_split(tmp_path: Path) -> None:
    make(tmp_path, 1)
    train = {content(task) for task in read(TRAIN_TASKS)}
    assert not train & {content(task) for task in read(tmp_path / "tasks" / "eval.jsonl")}


def test_the_split_holds_out_a_fifth() -> None:
    rng = random.Random(3)
    share = sum(held_out(make_question(rng, "one_call")) for _ in range(4000)) / 4000
    assert 0.17 < share < 0.23


def test_the_steps_of_a_solution_take_one_operator_each() -> None:
    rng = random.Random(4)
    for i in range(2000):
        kind = KINDS[i % 4]
        name = make_name(rng) if kind.startswith("lookup") else None
        code = make_code(rng) if name else None
        question = make_question(rng, kind, name)
        steps = question.steps(code)
        assert len(steps) == {"one_call": 1, "two_calls": 2, "lookup": 0, "lookup_then_calculate": 1}[kind]
        for expression, value in steps:
            assert calculate(expression, 1) == str(value)
        assert all(value >= 0 for _, value in steps[:-1])
        assert abs(question.answer(code)) < 10**7


def test_operands_have_two_or_three_digits() -> None:
    rng = random.Random(5)
    assert {len(str(make_operand(rng))) for _ in range(200)} == {2, 3}


def test_what_a_question_says() -> None:
    assert Question("one_call", None, ("*",), (12, 34)).text == "What is 12*34?"
    assert Question("two_calls", None, ("*", "-"), (12, 34, 56)).text == "What is (12*34)-56?"
    assert Question("lookup", "Bogavi", (), ()).text == "What is the code of Bogavi?"
    assert Question("lookup_then_calculate", "Bogavi", ("-",), (99,)).text == "What is the code of Bogavi minus 99?"
