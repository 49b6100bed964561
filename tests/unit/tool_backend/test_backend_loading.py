"""What the command line names, and what keeps a backend from starting."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tool_backend import BackendStartError, Tool, tool
from tool_backend.loading import by_name, load_tools
from tool_backend.serve import new_instance_id, split_arguments
from tool_backend.settings import BackendSettings

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "tools_" + "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
        from tool_backend import tool
        @tool
        def one(a: int) -> int:
            return a
        def two(a: int) -> int:
            return a
        all_tools = [one, two]
        number = 3
        class Space:
            inner = one
        """)
    )
    return name


def names(*wanted: str) -> list[str]:
    return sorted(load_tools(wanted, BackendSettings()))


def test_built_in_and_own_tools(module: str) -> None:
    assert names("calculator") == ["calculator"]
    assert names("calculator", f"{module}:one") == ["calculator", "one"]
    assert names(f"{module}:two") == ["two"]
    assert names(f"{module}:all_tools") == ["one", "two"]
    assert names(f"{module}:Space.inner") == ["one"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("calculater", "is no built-in tool (calculator, search)"),
        ("search", "set backend.search.corpus"),
        ("MODULE:", "names no tool"),
        (":one", "names no tool"),
        ("MODULE:three", "has no 'three'"),
        ("MODULE:number", "is int; a tool is a function"),
        ("no_such_module_here:x", "there is no module 'no_such_module_here'"),
    ],
)
def test_names_that_mean_nothing(module: str, name: str, part: str) -> None:
    with pytest.raises(BackendStartError) as caught:
        names(name.replace("MODULE", module))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("1/0", "raised ZeroDivisionError in"),
        ("import no_such_thing", "needs 'no_such_thing', not installed"),
        ("def f(:", "raised SyntaxError in"),
        ("raise SystemExit(0)", "raised SystemExit in"),
        ("from tool_backend import tool\n@tool\ndef f(a): ...", "tool 'f': parameter 'a' needs a type hint"),
    ],
)
def test_modules_that_fail_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, part: str) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "breaks_at_import.py").write_text(source)
    with pytest.raises(BackendStartError) as caught:
        names("breaks_at_import:f")
    sys.modules.pop("breaks_at_import", None)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_two_tools_of_one_name() -> None:
    def make() -> Tool:
        @tool(name="same")
        def f(a: int) -> int:
            return a

        return f

    with pytest.raises(BackendStartError, match="two tools are named 'same'"):
        by_name([make(), make()])
    one = make()
    assert list(by_name([one, one])) == ["same"]
    with pytest.raises(BackendStartError, match="no tool to serve"):
        by_name([])


def test_arguments_are_told_from_options() -> None:
    assert split_arguments(["calculator", "search", "--set", "backend.port=0"]) == (
        ["calculator", "search"],
        ["--set", "backend.port=0"],
    )
    assert split_arguments(["--config", "f.yaml", "m:x", "--set=a.b=1", "--set", "a.c=2"]) == (
        ["m:x"],
        ["--config", "f.yaml", "--set", "a.b=1", "--set", "a.c=2"],
    )
    assert split_arguments(["--help"]) == ([], ["--help"])


def test_instance_ids_are_never_the_same() -> None:
    assert len({new_instance_id() for _ in range(1000)}) == 1000


def test_imports_without_torch_and_vllm(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "title": "a", "text": "b"}\n')
    program = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "transformers", "tool_gateway", "rollout_node", "trainer_node"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocked())
import pkgutil, importlib, pathlib
import tool_backend
for module in pkgutil.walk_packages(tool_backend.__path__, "tool_backend."):
    if module.name != "tool_backend.__main__":
        importlib.import_module(module.name)
from tool_backend.loading import load_tools
from tool_backend.settings import BackendSettings, SearchSettings
load_tools(["calculator", "search"], BackendSettings(search=SearchSettings(corpus=pathlib.Path({str(corpus)!r}))))
assert not {{"torch", "vllm"}} & set(sys.modules)
print("imported")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "imported\n", done.stderr
