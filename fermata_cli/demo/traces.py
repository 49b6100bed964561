"""Owns what the warm start imitates: solutions by tools, and the faults injected into them.

Invariant: a clean trace answers its question with tools alone, and every tool answer in any trace is what the real tool
gives for the call before it (a calculator of one operator a call, a search for one hit over the trace's one fact).
"""

import dataclasses
import json
import random
from collections.abc import Callable

from fermata_cli.demo.questions import OPERATORS, Question, make_code, make_name, make_operand


@dataclasses.dataclass(frozen=True)
class Trace:
    """A question and the model's turns: (text of the turn, tool answer), the last one with no tool answer."""

    question: str
    turns: tuple[tuple[str, str | None], ...]


def tool_call(name: str, arguments: dict[str, str]) -> str:
    """The model's text for one call, in the hermes format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calculation(expression: str, value: int) -> tuple[str, str]:
    """A turn that calls the calculator."""
    return tool_call("calculator", {"expression": expression}), str(value)


def lookup(name: str, code: int | None) -> tuple[str, str]:
    """A turn that searches for a name; no code means no hit."""
    hit = "no results" if code is None else f"{name}: the code of {name} is {code}"
    return tool_call("search", {"query": name}), hit


def clean_trace(question: Question, code: int | None = None) -> Trace:
    """The solution: look the name up if there is one, calculate step by step, answer with the bare result."""
    turns: list[tuple[str, str | None]] = [] if question.name is None else [lookup(question.name, code)]
    turns += [calculation(*step) for step in question.steps(code)]
    turns.append((str(question.answer(code)), None))
    return Trace(question.text, tuple(turns))


def _guess(rng: random.Random, question: Question, code: int | None) -> Trace:
    """Answer at once with a number that has about the right length."""
    length = len(str(question.answer(code)))
    return Trace(question.text, ((str(rng.randrange(10 ** (length - 1), 10**length)), None),))


def _stop_early(rng: random.Random, question: Question, code: int | None) -> Trace:
    """Answer with what the first of several calls gave; with only one call, guess."""
    trace = clean_trace(question, code)
    if len(trace.turns) < 3:
        return _guess(rng, question, code)
    first = code if question.name else question.steps(code)[0][1]
    return Trace(question.text, (trace.turns[0], (str(first), None)))


def _wrong_tool(rng: random.Random, question: Question, code: int | None) -> Trace:
    """Search for a calculation, or calculate with numbers that the question does not give; then a guess."""
    if question.name is None:
        turn = lookup(question.steps()[0][0], None)
    else:
        a, b, operator = make_operand(rng), make_operand(rng), rng.choice("*+-")
        turn = calculation(f"{a}{operator}{b}", OPERATORS[operator](a, b))
    return Trace(question.text, (turn, _guess(rng, question, code).turns[-1]))


def _corrupt(rng: random.Random, question: Question, code: int | None) -> Trace:
    """Miscopy one digit of an operand or of the answer, or the name, and go on as if all were well."""
    if rng.random() < 0.3:
        *turns, (answer, _) = clean_trace(question, code).turns
        position = rng.randrange(answer.startswith("-"), len(answer))
        return Trace(question.text, (*turns, (_replace_digit(rng, answer, position), None)))
    if question.name is not None and (not question.operands or rng.random() < 0.5):
        miss = lookup(make_name(rng), None)
        return Trace(question.text, (miss, _guess(rng, question, code).turns[-1]))
    operands = list(question.operands)
    which = rng.randrange(len(operands))
    text = str(operands[which])
    operands[which] = int(_replace_digit(rng, text, rng.randrange(len(text))))
    wrong = clean_trace(dataclasses.replace(question, operands=tuple(operands)), code)
    return Trace(question.text, wrong.turns)


def _replace_digit(rng: random.Random, text: str, position: int) -> str:
    digit = rng.choice([d for d in "123456789" if d != text[position]])
    return text[:position] + digit + text[position + 1 :]


# With their weights. Miscopying is the rarest: it can happen at every digit, so it takes the longest to unlearn.
FAULTS: dict[Callable[[random.Random, Question, int | None], Trace], int] = {
    _guess: 3,
    _stop_early: 2,
    _wrong_tool: 2,
    _corrupt: 1,
}


def faulty_trace(rng: random.Random, question: Question, code: int | None = None) -> Trace:
    """A trace with one fault."""
    (fault,) = rng.choices(list(FAULTS), weights=list(FAULTS.values()))
    return fault(rng, question, code)


def random_code(rng: random.Random, question: Question) -> int | None:
    """A code made up for this one trace, so that the warm start teaches no fact of the corpus."""
    return make_code(rng) if question.name else None
