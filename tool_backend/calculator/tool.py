"""The tool ``calculator``: an expression in, its exact value out."""

from __future__ import annotations

from tool_backend.calculator.arithmetic import evaluate, to_text
from tool_backend.calculator.grammar import parse
from tool_backend.errors import ToolError
from tool_backend.settings import CalculatorSettings
from tool_backend.tool import Tool, ToolOptions

DESCRIPTION = (
    "Compute an arithmetic expression exactly. Knows integers, decimals, + - * / // % ** and parentheses. "
    "The answer is an integer or a decimal where the value is one, else a fraction such as 1/3."
)


def calculate(expression: str, max_operators: int | None = None) -> str:
    """The exact value of an expression as text; ``ToolError`` says in one sentence what is wrong with it."""
    tree, operators = parse(expression)
    if max_operators is not None and operators > max_operators:
        bound = f"{max_operators} operator{'' if max_operators == 1 else 's'}"
        raise ToolError(f"the calculator takes at most {bound} in one call, this expression has {operators}")
    return to_text(evaluate(tree))


def make_calculator(settings: CalculatorSettings) -> Tool:
    """The tool with its settings."""

    # Async, so that it runs in the event loop: its work is bounded and far shorter than the way to a thread.
    async def calculator(expression: str) -> str:
        """Args:
        expression: for example 12*34 or (1 + 2) / 3
        """
        return calculate(expression, settings.max_operators)

    return Tool(
        calculator,
        description=DESCRIPTION,
        options=ToolOptions(read_only=True, default_timeout_s=10.0, max_timeout_s=60.0, max_output_bytes=32 * 1024),
    )
