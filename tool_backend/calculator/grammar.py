"""Text of an expression to a tree: numbers, ``+ - * / // % **``, unary signs and parentheses, and nothing else.

Precedence and associativity are Python's: ``-2 ** 2`` is -4, ``2 ** 3 ** 2`` is 512, ``2 ** -1`` is a half. Whatever is
parsed is only ever a tree of ``Number``, ``Negation`` and ``Operation``: no names, no calls, nothing that could run.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

from tool_backend.errors import ToolError

MAX_CHARACTERS = 1_000
MAX_NESTING = 64
MAX_EXPONENT_DIGITS = 4  # of a literal such as 1e9999

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    | (?P<operator>\*\*|//|[-+*/%()])
    | (?P<name>[^\W\d]\w*)
    | (?P<other>\S)
    )""",
    re.VERBOSE,
)
# What models and keyboards write for the plain signs.
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})
_BINARY = {"+": 10, "-": 10, "*": 20, "/": 20, "//": 20, "%": 20, "**": 40}
_UNARY_POWER = 30
_KNOWN = "only numbers, + - * / // % ** and parentheses are known"


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A literal, exact."""

    value: Fraction


@dataclasses.dataclass(frozen=True, slots=True)
class Negation:
    """A unary minus."""

    operand: Tree


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """A binary operator between two trees."""

    operator: str
    left: Tree
    right: Tree


Tree = Number | Negation | Operation


@dataclasses.dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int  # counted from 1, as people count


def parse(expression: str) -> tuple[Tree, int]:
    """The tree of an expression and how many binary operators it has; ``ToolError`` says what is wrong."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters, at most {MAX_CHARACTERS} are allowed")
    parser = _Parser(_tokens(expression.translate(_SPELLINGS)))
    return parser.whole(), parser.operators


def _tokens(text: str) -> list[_Token]:
    tokens = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "other"
        at = match.start(kind) + 1
        word = match.group(kind)
        if kind == "name":
            raise ToolError(f"the expression has the name '{word}' at character {at}; {_KNOWN}")
        if kind == "other":
            raise ToolError(f"the expression has '{word}' at character {at}; {_KNOWN}")
        tokens.append(_Token(kind, word, at))
    return tokens


class _Parser:
    """Precedence climbing over a list of tokens."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self.operators = 0

    def whole(self) -> Tree:
        if not self._tokens:
            raise ToolError("the expression is empty; write something like 12*34")
        tree = self._expression(0, 0)
        if (left_over := self._peek()) is not None:
            if left_over.text == ")":
                raise ToolError(f"the ')' at character {left_over.at} closes nothing")
            raise ToolError(f"an operator is missing before '{left_over.text}' at character {left_over.at}")
        return tree

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _expression(self, power: int, depth: int) -> Tree:
        left = self._operand(depth)
        while (token := self._peek()) is not None and _BINARY.get(token.text, -1) >= power:
            self._next += 1
            self.operators += 1
            own = _BINARY[token.text]
            # The right side of ** reaches down to unary signs and further ** (right-associative).
            right = self._expression(_UNARY_POWER if token.text == "**" else own + 1, depth + (token.text == "**"))
            left = Operation(token.text, left, right)
        return left

    def _operand(self, depth: int) -> Tree:
        if depth > MAX_NESTING:
            raise ToolError(f"the expression is nested deeper than {MAX_NESTING} levels")
        token = self._peek()
        if token is None:
            raise ToolError("the expression ends where a number is missing")
        self._next += 1
        if token.kind == "number":
            return Number(_literal(token))
        if token.text in "+-":
            operand = self._expression(_UNARY_POWER, depth + 1)
            return Negation(operand) if token.text == "-" else operand
        if token.text == "(":
            inner = self._expression(0, depth + 1)
            closing = self._peek()
            if closing is None:
                raise ToolError(f"the '(' at character {token.at} is never closed")
            if closing.text != ")":
                raise ToolError(f"an operator is missing before '{closing.text}' at character {closing.at}")
            self._next += 1
            return inner
        raise ToolError(f"a number is missing before '{token.text}' at character {token.at}")


def _literal(token: _Token) -> Fraction:
    mantissa, _, exponent = token.text.lower().partition("e")
    if len(exponent.lstrip("+-0")) > MAX_EXPONENT_DIGITS:
        raise ToolError(f"the number at character {token.at} is too large; its exponent may have 4 digits at most")
    whole, _, decimals = mantissa.partition(".")
    shift = (int(exponent) if exponent else 0) - len(decimals)
    digits = int(whole + decimals)
    return Fraction(digits * 10**shift) if shift >= 0 else Fraction(digits, 10**-shift)
