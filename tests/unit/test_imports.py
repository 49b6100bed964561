"""Imports run downwards only, and what must work without an engine does."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NODES = {"tool_gateway", "tool_backend", "rollout_node", "trainer_node"}
# The client of the gateway is a public library (docs/adr/0003).
ALLOWED = {("rollout_node", "tool_gateway.client")}
MODULES = sorted(path for package in (*NODES, "node_runtime") for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def forbidden(package: str, name: str) -> bool:
    top = name.split(".")[0]
    if top == package or any(package == p and (name + ".").startswith(allowed + ".") for p, allowed in ALLOWED):
        return False
    return top in NODES | {"fermata_cli"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_import_upwards_or_sideways(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    wrong = [name for name in imported(path) if forbidden(package, name)]
    assert not wrong, f"{path} imports {wrong}"


def test_the_rule_bites() -> None:
    assert forbidden("rollout_node", "tool_gateway.server")
    assert forbidden("tool_gateway", "rollout_node")
    assert forbidden("node_runtime", "fermata_cli.main")
    assert not forbidden("rollout_node", "tool_gateway.client.state")
    assert not forbidden("tool_gateway", "tool_gateway.ledger")


WITHOUT_ENGINE = """
import builtins, sys
real = builtins.__import__
def guarded(name, *rest, **named):
    if name.split(".")[0] in ("torch", "vllm", "transformers"):
        raise ImportError(f"{name} is not installed here")
    return real(name, *rest, **named)
builtins.__import__ = guarded
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    "module",
    [
        "node_runtime.grpc_server",
        "tool_gateway.process",
        "tool_gateway.client",
        "tool_backend",
        "tool_backend.serve",
        "rollout_node.settings",
        "rollout_node.turn",
        "rollout_node.turn.check",
        "trainer_node.settings",
        "fermata_cli.main",
    ],
)
def test_imports_without_an_engine(module: str) -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_ENGINE, module], capture_output=True, text=True, timeout=50)
    assert ran.returncode == 0, ran.stderr
