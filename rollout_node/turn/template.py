"""A model's own chat template, rendered to text as transformers renders it.

Owns the Jinja environment. Invariant: the template runs in a sandbox and its failures come back as one sentence.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollout_node.turn.records import RenderError, TurnFormatError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote; for rendering it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """``variables`` are what templates expect beside messages and tools: bos_token, eos_token, switches."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.variables = dict(variables or {})
        described = json.dumps([source, self.variables], sort_keys=True, default=str)
        self.hash = hashlib.sha256(described.encode()).hexdigest()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise TurnFormatError(f"the chat template breaks at line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation. RenderError where the template refuses it."""
        try:
            return self._template.render(
                **{
                    **self.variables,
                    "messages": [dict(message) for message in messages],
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (
            jinja2.exceptions.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise RenderError(f"the chat template refuses these messages: {str(error)[:300]}") from error
