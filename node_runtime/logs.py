"""Structured logs, on stderr only.

Invariant: stdout is data (the ready line, a command's output) and never carries a log line; records of the standard
`logging` module (gRPC, asyncio, vLLM) get the same form as our own.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

import structlog

from node_runtime.runtime_settings import RuntimeSettings

_SHARED: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
]

# Before configure() warnings reach stderr through logging's last resort, and nothing reaches stdout.
structlog.configure(
    processors=[structlog.stdlib.filter_by_level, *_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    logger_factory=structlog.stdlib.LoggerFactory(),
    wrapper_class=structlog.stdlib.BoundLogger,
)


def configure(runtime: RuntimeSettings, process: str) -> None:
    """Sends all log records to stderr in the form `runtime` asks for. May be called again; the last call counts."""
    name = runtime.node_name or process

    def add_node(_logger: Any, _method: str, event: Any) -> Any:
        event["node"] = name
        return event

    render: list[Any]
    if runtime.log_format == "json":
        render = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer(ensure_ascii=False)]
    else:
        render = [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[add_node, structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(runtime.log_level.upper())


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger; call as `log.info("what happened", key=value)`."""
    return cast(structlog.stdlib.BoundLogger, structlog.get_logger(name))
