"""The calculator: exactly what Fraction arithmetic gives, in bounded work, and one sentence for everything else."""

from __future__ import annotations

import contextlib
import json
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from fermata.v1 import tool_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from tool_backend.calculator.arithmetic import evaluate, to_text
from tool_backend.calculator.grammar import parse
from tool_backend.calculator.tool import calculate, make_calculator
from tool_backend.errors import ToolError
from tool_backend.settings import CalculatorSettings
from tool_backend.testing import call, text


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*34", "408"),
        ("7 - 10", "-3"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "1/3"),
        ("-2/6", "-1/3"),
        ("1/8", "0.125"),
        ("-1/40", "-0.025"),
        ("10/5", "2"),
        ("-2 ** 2", "-4"),
        ("(-2) ** 2", "4"),
        ("2 ** 3 ** 2", "512"),
        ("2 ** -1", "0.5"),
        ("2 ** -1 ** 2", "0.5"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 // 2", "3"),
        ("7.5 % 2", "1.5"),
        ("1e3 + .5", "1000.5"),
        ("5.", "5"),
        ("--3", "3"),
        ("+3 - -3", "6"),
        ("2 * (3 + 4) * 5", "70"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("0 ** 0", "1"),
        ("(-1) ** 1000000000000000000000", "1"),
        ("0 ** 99999999999999999999", "0"),
        ("12345678901234567890 * 98765432109876543210", "1219326311370217952237463801111263526900"),
    ],
)
def test_results(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "part"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("1 +", "ends where a number is missing"),
        ("* 2", "a number is missing before '*' at character 1"),
        ("1 2", "an operator is missing before '2' at character 3"),
        ("(1 + 2", "'(' at character 1 is never closed"),
        ("1 + 2)", "')' at character 6 closes nothing"),
        ("(1 2)", "an operator is missing before '2'"),
        ("()", "a number is missing before ')'"),
        ("sqrt(2)", "the name 'sqrt' at character 1"),
        ("__import__('os')", "the name '__import__'"),
        ("2 ^ 3", "'^' at character 3"),
        ("1,000", "',' at character 2"),
        ("1/0", "division by zero"),
        ("5 % (2 - 2)", "division by zero"),
        ("5 // 0.0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "must be an integer"),
        ("9**9**9", "more than 10000 digits"),
        ("9**9**9**9**9", "more than 10000 digits"),
        ("2 ** -99999", "more than 10000 digits"),
        ("1e9999 * 1e9999", "more than 10000 digits"),
        ("1e99999", "too large"),
        ("1" * 1001, "1001 characters"),
        ("(" * 100 + "1" + ")" * 100, "nested deeper than 64"),
        ("-" * 100 + "1", "nested deeper than 64"),
        ("1" + "**1" * 100, "nested deeper than 64"),
    ],
)
def test_refusals_are_one_sentence(expression: str, part: str) -> None:
    with pytest.raises(ToolError) as caught:
        calculate(expression)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_long_but_small_expressions_are_fine() -> None:
    assert calculate("+".join(["1"] * 500)) == "500"
    assert calculate("9" * 1000) == "9" * 1000
    assert calculate("(" * 60 + "1" + ")" * 60) == "1"


@pytest.mark.parametrize(
    ("first", "more"),
    [
        ("1", "+7**11000/3**20000"),
        ("1", "*(10**9999+1)/(10**9998+3)"),
        ("2", "/7**900"),
        ("1e9999", "-1e-9999"),
        ("2**33000", "%3**20000+2**33000"),
        ("1/3**20000", "+1/7**11000"),
        ("1", "/2**33000*3**20000"),
    ],
)
def test_the_worst_that_may_be_written_takes_a_moment_at_most(first: str, more: str) -> None:
    expression = first + more * ((1000 - len(first)) // len(more))
    parse(expression)  # it is refused for its work, not for its form
    began = time.process_time()
    with contextlib.suppress(ToolError):
        calculate(expression)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("max_operators", [0, 1, 2])
def test_operators_are_bounded_where_the_setting_says_so(max_operators: int) -> None:
    expressions = ["-(12)", "12*-34", "1+2*3", "1+2*3-4"]
    for operators, expression in enumerate(expressions):
        if operators <= max_operators:
            calculate(expression, max_operators)
        else:
            with pytest.raises(ToolError, match=f"at most {max_operators} operators? in one call.* has {operators}$"):
                calculate(expression, max_operators)


def test_as_a_tool() -> None:
    calculator = make_calculator(CalculatorSettings(max_operators=1))
    final = call(calculator, {"expression": "12*34"})
    assert (final.outcome, text(final)) == (tool_pb2.OUTCOME_OK, "408")
    final = call(calculator, {"expression": "1+2*3"})
    assert (final.outcome, final.fault) == (tool_pb2.OUTCOME_TOOL_ERROR, tool_pb2.FAULT_MODEL)
    assert "at most 1 operator in one call" in text(final)
    assert call(calculator, {"expression": 12}).outcome == tool_pb2.OUTCOME_INVALID_ARGS
    assert json.loads(calculator.spec.input_schema_json)["required"] == ["expression"]
    assert calculator.spec.idempotent
    assert calculator.spec.read_only


numbers = st.one_of(
    st.integers(0, 10**12).map(str),
    st.decimals(0, 10**6, places=3).map(str),
)
operators = st.sampled_from(["+", "-", "*", "/", "//", "%"])


def combine(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(children, operators, children).map(lambda each: f"({each[0]} {each[1]} {each[2]})"),
        st.tuples(children, st.integers(-3, 4)).map(lambda each: f"({each[0]}) ** ({each[1]})"),
        children.map(lambda child: f"-({child})"),
    )


expressions = st.recursive(numbers, combine, max_leaves=12).filter(lambda expression: len(expression) <= 1000)


def reference(expression: str) -> Fraction | None:
    """Python's own parser and Fraction arithmetic; only the test uses eval, on expressions it made itself."""
    import ast

    class Wrap(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.Call:
            spelled = ast.get_source_segment(expression, node)
            return ast.copy_location(ast.Call(ast.Name("Fraction", ast.Load()), [ast.Constant(spelled)], []), node)

    tree = ast.fix_missing_locations(Wrap().visit(ast.parse(expression, mode="eval")))
    try:
        return Fraction(eval(compile(tree, "expression", "eval"), {"Fraction": Fraction}))
    except ZeroDivisionError:
        return None


@settings(max_examples=300, deadline=None)
@given(expressions)
def test_equals_fraction_arithmetic(expression: str) -> None:
    expected = reference(expression)
    if expected is None:
        with pytest.raises(ToolError, match="division by zero"):
            calculate(expression)
        return
    tree, _ = parse(expression)
    assert evaluate(tree) == expected
    assert Fraction(to_text(expected)) == expected


@given(st.fractions())
def test_text_is_the_value_in_its_plainest_form(value: Fraction) -> None:
    written = to_text(value)
    assert Fraction(written) == value
    if "/" in written:
        assert written == f"{value.numerator}/{value.denominator}"
        assert Fraction(Decimal(value.numerator) / Decimal(value.denominator)) != value  # no decimal says it
    elif "." in written:
        assert not written.endswith("0")
    else:
        assert value.denominator == 1


@given(st.text(max_size=60))
def test_any_text_gives_a_value_or_one_sentence(expression: str) -> None:
    with contextlib.suppress(ToolError):
        assert calculate(expression)
