"""What the command line names to the tools it means: built-in ones by name, others as ``module:object``.

Invariant: whatever is wrong with a tool keeps the process from starting, in one sentence (exit code 2).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from node_runtime.logs import get_logger
from tool_backend.errors import BackendStartError
from tool_backend.settings import BackendSettings
from tool_backend.tool import Tool

_log = get_logger(__name__)


def _calculator(settings: BackendSettings) -> Tool:
    from tool_backend.calculator.tool import make_calculator

    return make_calculator(settings.calculator)


def _search(settings: BackendSettings) -> Tool:
    from tool_backend.search.tool import make_search  # numpy and bm25s only where they are needed

    return make_search(settings.search)


BUILT_IN: dict[str, Callable[[BackendSettings], Tool]] = {"calculator": _calculator, "search": _search}


def load_tools(names: Sequence[str], settings: BackendSettings) -> dict[str, Tool]:
    """The tools that ``names`` mean, by their own names."""
    return by_name(tool for name in names for tool in _load(name, settings))


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Tools by name; two of one name are refused."""
    named: dict[str, Tool] = {}
    for tool in tools:
        if named.setdefault(tool.name, tool) is not tool:
            raise BackendStartError(f"two tools are named '{tool.name}'; give one of them another with @tool(name=...)")
    if not named:
        raise BackendStartError("there is no tool to serve; name a built-in one, or module:object")
    return named


def _load(name: str, settings: BackendSettings) -> list[Tool]:
    if name in BUILT_IN:
        return [BUILT_IN[name](settings)]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        built_in = ", ".join(BUILT_IN)
        raise BackendStartError(f"'{name}' is no built-in tool ({built_in}); other tools are named module:object")
    if not module_name or not attribute:
        raise BackendStartError(f"'{name}' names no tool; write module:object, as in mytools:add")
    found: Any = _import(module_name, name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BackendStartError(f"'{name}': module '{module_name}' has no '{part}'")
        found = getattr(found, part)
    return as_tools(found, name)


def _import(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except BackendStartError:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if missing == module_name or module_name.startswith(f"{missing}."):
            raise BackendStartError(
                f"'{name}': there is no module '{missing}'; run from its folder, or put that on PYTHONPATH"
            ) from error
        raise BackendStartError(f"'{name}': module '{module_name}' needs '{missing}', not installed") from error
    except (Exception, SystemExit) as error:
        _log.error("import failed", module=module_name, exc_info=error)
        where = _last_line(error)
        reason = " ".join(str(error).split())[:300]
        raise BackendStartError(
            f"'{name}': importing module '{module_name}' raised {type(error).__name__}{where}: {reason}"
        ) from error


def _last_line(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f" in {error.filename}, line {error.lineno}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" in {trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}"


def as_tools(found: Any, name: str) -> list[Tool]:
    """A tool, a plain function (made one with the default options), or a list of either."""
    if isinstance(found, Tool):
        return [found]
    if isinstance(found, list | tuple):
        return [tool for item in found for tool in as_tools(item, name)]
    if inspect.isfunction(found):
        return [Tool(found)]
    raise BackendStartError(f"'{name}' is {type(found).__name__}; a tool is a function, best one marked with @tool")
