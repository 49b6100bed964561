"""Owns what the demo asks: four kinds of question, made-up names, and the hash that holds questions out.

Invariant: `held_out` depends on the question alone, so no seed, order or count can move a held-out question into
training. Questions about a name are held out by the name, so a code asked for in evaluation is never seen before.
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable

KINDS = ("one_call", "two_calls", "lookup", "lookup_then_calculate")
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "*": lambda a, b: a * b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
}
WORDS = {"*": "times", "+": "plus", "-": "minus"}
HELD_OUT_SHARE = 5  # one question in five is for evaluation only

SYLLABLES = tuple(onset + vowel for onset in "bdgkvz" for vowel in "aeio")


@dataclasses.dataclass(frozen=True)
class Question:
    """One question and all that its solution needs.

    `operators` and `operands` are the calculation in the order of its steps; a `name` stands for its first operand.
    """

    kind: str
    name: str | None
    operators: tuple[str, ...]
    operands: tuple[int, ...]

    @property
    def text(self) -> str:
        """The question as the model reads it."""
        if self.kind == "one_call":
            return f"What is {self.operands[0]}{self.operators[0]}{self.operands[1]}?"
        if self.kind == "two_calls":
            (a, b, c), (first, second) = self.operands, self.operators
            return f"What is ({a}{first}{b}){second}{c}?"
        if self.kind == "lookup":
            return f"What is the code of {self.name}?"
        return f"What is the code of {self.name} {WORDS[self.operators[0]]} {self.operands[0]}?"

    def steps(self, code: int | None = None) -> list[tuple[str, int]]:
        """The calculator calls of the solution: (expression, value), exact. `code` is what the name stands for."""
        values = list(self.operands) if self.name is None else [code, *self.operands]
        result, steps = values[0], []
        for operator, operand in zip(self.operators, values[1:], strict=True):
            expression = f"{result}{operator}{operand}"
            result = OPERATORS[operator](result, operand)
            steps.append((expression, result))
        return steps

    def answer(self, code: int | None = None) -> int:
        """The integer that answers the question."""
        steps = self.steps(code)
        return steps[-1][1] if steps else code


def held_out(question: Question) -> bool:
    """Whether this question is for evaluation only."""
    text = question.text if question.name is None else f"What is the code of {question.name}?"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT_SHARE == 0


def make_name(rng: random.Random) -> str:
    """A made-up name of three different syllables, about which no language model knows a fact."""
    return "".join(rng.sample(SYLLABLES, 3)).capitalize()


def make_code(rng: random.Random) -> int:
    """The code of a name: two or three digits, as the operands are."""
    return make_operand(rng)


def make_operand(rng: random.Random, *, digits: int | None = None) -> int:
    """An integer of two or three digits, each length equally often unless `digits` says which."""
    digits = digits or rng.choice((2, 3))
    return rng.randrange(10 ** (digits - 1), 10**digits)


def make_question(rng: random.Random, kind: str, name: str | None = None) -> Question:
    """A random question of `kind`; the kinds with a lookup take the name.

    Intermediate results are never negative, and chained products keep to two digits: what is hard here is calling the
    tools, not copying long numbers.
    """
    if kind == "lookup":
        return Question(kind, name, (), ())
    if kind == "lookup_then_calculate":
        return Question(kind, name, (rng.choice("*+-"),), (make_operand(rng),))
    if kind == "one_call":
        return Question(kind, None, (rng.choice("*+-"),), (make_operand(rng), make_operand(rng)))
    operators = (rng.choice("*+-"), rng.choice("*+-"))
    digits = 2 if operators == ("*", "*") else None
    a, b, c = (make_operand(rng, digits=digits) for _ in range(3))
    if operators[0] == "-" and a < b:
        a, b = b, a
    return Question(kind, None, operators, (a, b, c))
