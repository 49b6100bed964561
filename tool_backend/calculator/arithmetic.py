"""A tree to its exact value, and the value to text. The work is bounded before it is done, never timed.

No number on the way may have more than ``MAX_DIGITS`` digits (a power is refused from its size alone, before it is
computed), and all numbers on the way together no more than ``MAX_WORK_DIGITS``.
"""

from __future__ import annotations

import math
from fractions import Fraction

from tool_backend.calculator.grammar import Negation, Number, Tree
from tool_backend.errors import ToolError

MAX_DIGITS = 10_000
MAX_WORK_DIGITS = 200_000
_BITS_PER_DIGIT = math.log2(10)
_MAX_BITS = math.ceil(MAX_DIGITS * _BITS_PER_DIGIT)
_CHUNK_DIGITS = 4_000  # below the interpreter's own limit on turning integers into text


def evaluate(tree: Tree) -> Fraction:
    """The exact value of a tree; ``ToolError`` where there is none, or where it would take too much work."""
    return _Evaluator().value(tree)


def to_text(value: Fraction) -> str:
    """An integer plainly, what ends as a decimal as a decimal, anything else as a reduced fraction ("1/3")."""
    sign = "-" if value < 0 else ""
    numerator, denominator = abs(value.numerator), value.denominator
    if denominator == 1:
        return sign + _digits(numerator)
    places = _decimal_places(denominator)
    if places is None or places > MAX_DIGITS:
        return f"{sign}{_digits(numerator)}/{_digits(denominator)}"
    scaled = _digits(numerator * 10**places // denominator).zfill(places + 1)
    return f"{sign}{scaled[:-places]}.{scaled[-places:]}"


class _Evaluator:
    def __init__(self) -> None:
        self._work_digits = 0

    def value(self, tree: Tree) -> Fraction:
        # Depth is bounded by the grammar except along left-leaning chains (1+1+1+...), so those are walked in a loop.
        chain = []
        node = tree
        while not isinstance(node, Number | Negation):
            chain.append(node)
            node = node.left
        result = self._checked(node.value if isinstance(node, Number) else -self.value(node.operand))
        for operation in reversed(chain):
            result = self._checked(self._apply(operation.operator, result, self.value(operation.right)))
        return result

    def _apply(self, operator: str, left: Fraction, right: Fraction) -> Fraction:
        if operator == "+":
            return left + right
        if operator == "-":
            return left - right
        if operator == "*":
            return left * right
        if operator == "**":
            return _power(left, right)
        if right == 0:
            raise ToolError(f"division by zero: the right side of '{operator}' is 0")
        if operator == "/":
            return left / right
        quotient = left // right
        return Fraction(quotient) if operator == "//" else left - right * quotient

    def _checked(self, value: Fraction) -> Fraction:
        largest = max(value.numerator.bit_length(), value.denominator.bit_length())
        if largest > _MAX_BITS:
            raise ToolError(f"a number in this expression would have more than {MAX_DIGITS} digits")
        self._work_digits += int(largest / _BITS_PER_DIGIT)
        if self._work_digits > MAX_WORK_DIGITS:
            raise ToolError("this expression takes too much work; split it into smaller ones")
        return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("the exponent of '**' must be an integer, because other powers are not exact")
    times = exponent.numerator
    if base == 0 and times < 0:
        raise ToolError("division by zero: 0 cannot be raised to a negative power")
    if abs(base) in (0, 1):
        return base if times % 2 or (base == 0 and times) else Fraction(1)
    # (bit_length - 1) * times is a lower bound of the size of the result: what it refuses really is too large.
    largest = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if (largest - 1) * abs(times) > _MAX_BITS or abs(times) > _MAX_BITS:
        raise ToolError(f"this power would have more than {MAX_DIGITS} digits")
    return base**times


def _decimal_places(denominator: int) -> int | None:
    """How many decimals a reduced fraction takes; None where they never end."""
    twos = (denominator & -denominator).bit_length() - 1
    rest = denominator >> twos
    fives = round(math.log(rest, 5))
    return max(twos, fives) if rest == 5**fives else None


def _digits(number: int) -> str:
    """Decimal text of a non-negative integer of any length that is allowed here."""
    chunk = 10**_CHUNK_DIGITS
    parts = []
    while number >= chunk:
        number, low = divmod(number, chunk)
        parts.append(str(low).zfill(_CHUNK_DIGITS))
    parts.append(str(number))
    return "".join(reversed(parts))
