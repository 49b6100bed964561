"""What the pages and the README tell a tool's author to type does what they say, on real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fermata_cli import main as command_line
from fermata_cli.cluster.settings import ClusterSettings
from fermata_cli.commands import demo
from fermata_cli.commands.demo_settings import DemoOptions, DemoSettings
from tests.support.pages import ROOT, Block, blocks
from tool_backend.loading import load_tools
from tool_backend.settings import BackendSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
FIRST_TOOL = ROOT / "docs" / "first-tool.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Stands in for the clone's root: nothing is left there, and the commands find their .venv."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_files(page: list[Block], folder: Path) -> None:
    for block in page:
        if block.file_name is not None:
            (folder / block.file_name).write_text(block.body)


class Shell:
    """One bash in which the blocks of a page are run one after the other, on ports that are free."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = {"7000": str(free_port()), "7020": str(free_port())}
        env = {k: v for k, v in os.environ.items() if not k.startswith("FERMATA_")}
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        self._bash = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._count = 0

    def run(self, block: Block) -> tuple[int, str]:
        """(status of the last command, what the block printed on stdout and stderr together)."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._count += 1
        mark = f"end of block {self._count}, status "
        self._bash.stdin.write(f"{self._on_free_ports(block.body)}\nprintf '\\n%s%s\\n' '{mark}' $?\n")
        self._bash.stdin.flush()
        said: list[str] = []
        for line in self._bash.stdout:
            if line.startswith(mark):
                return int(line.removeprefix(mark)), "".join(said).rstrip("\n")
            said.append(line)
        raise AssertionError(f"bash ended in the middle of {block.body!r}: {''.join(said)}")

    def _on_free_ports(self, text: str) -> str:
        for port, free in self._ports.items():
            text = text.replace(port, free)
        if "--gateway" not in text:  # the page relies on the default port
            text = re.sub(r"(fermata tools (?:call|list))", rf"\1 --gateway 127.0.0.1:{self._ports['7000']}", text)
        if "gateway.port" not in text:
            text = text.replace("-m tool_gateway", f"-m tool_gateway --set gateway.port={self._ports['7000']}")
        return text

    def use_free_ports(self, file: Path) -> None:
        """In a settings file of the page."""
        file.write_text(file.read_text().replace("7020", self._ports["7020"]))

    def status_of_jobs(self) -> int:
        """Waits for both processes of a page; 0 where both left in order."""
        return self.run(Block("sh", "", "wait %1 && wait %2"))[0]

    def close(self) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write("kill $(jobs -p) 2>/dev/null\nwait\n")
        self._bash.stdin.close()
        try:
            self._bash.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._bash.pid, signal.SIGKILL)
            raise


@pytest.fixture
def shell(folder: Path) -> Iterator[Shell]:
    opened = Shell(folder)
    try:
        yield opened
    finally:
        opened.close()


def told(text: str) -> list[str]:
    """Lines without the times in them."""
    return [re.sub(r"\d+\.\d+ s", "… s", line) for line in text.splitlines()]


def test_every_command_of_the_page_does_what_it_says(folder: Path, shell: Shell) -> None:
    page = blocks(FIRST_TOOL)
    write_files(page, folder)
    said: list[str] = []
    run = 0
    for block, following in zip(page, [*page[1:], None], strict=True):
        if block.language != "sh" or block.note:
            continue
        status, printed = shell.run(block)
        said.append(printed)
        run += 1
        if following is not None and following.language == "text":
            assert told(printed) == told(following.body)
        else:
            assert status == 0, f"{block.body}\n{printed}"
    assert run == 4
    assert "3 passed" in said[0]
    assert "408" in said[1].splitlines()
    assert re.search(r"^calculator +1/1  Work out", said[1], re.MULTILINE)
    assert shell.status_of_jobs() == 0


def test_its_tasks_and_its_last_command_are_accepted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the engine: the command line, the settings, the task file and the tools that they name."""
    page = blocks(FIRST_TOOL)
    write_files(page, folder)
    [tasks] = [block.body for block in page if block.language == "json"]
    (folder / "my_tasks.jsonl").write_text(tasks)
    [command] = [block.body for block in page if block.note == "engine"]
    given: list[DemoOptions] = []
    monkeypatch.setattr(demo, "run_demo", lambda options: given.append(options) or 0)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    words = subprocess.run(
        ["bash", "-c", command.replace(".venv/bin/fermata", "printf '%s\\0'")], capture_output=True, check=True
    ).stdout
    assert command_line.main(words.decode().split("\0")[:-1]) == 0
    settings = DemoSettings(given[0], folder / "runs" / given[0].name)
    assert isinstance(settings.cluster, ClusterSettings)
    served = {
        name for group in settings.cluster.backends for name in load_tools(group.tools, BackendSettings())
    }  # fmt: skip
    assert set(settings.tool_places) <= served == {"calculator", "roll_die"}


def test_the_tool_of_the_readme_runs(folder: Path, shell: Shell) -> None:
    page = blocks(ROOT / "README.md", "A tool of your own")
    write_files(page, folder)
    [commands] = [block for block in page if block.file_name is None]
    status, printed = shell.run(commands)
    assert status == 0, printed
    assert "3" in printed.splitlines()
    shell.run(Block("sh", "", "kill %1 %2"))
    assert shell.status_of_jobs() == 0


def test_certificates_by_hand_secure_the_tool(folder: Path, shell: Shell) -> None:
    """The commands of docs/security.md, openssl's among them."""
    page = blocks(ROOT / "docs" / "security.md")
    write_files(blocks(FIRST_TOOL) + page, folder)
    shell.use_free_ports(folder / "secure.yaml")
    printed = ""
    for block in page:
        if block.language == "sh" and not block.note:
            status, printed = shell.run(block)
            assert status == 0, printed
    assert "408" in printed.splitlines()
    listing = ".venv/bin/fermata tools list --wait 2"
    for refused in (listing, f"{listing} --config secure.yaml --set runtime.tokens.send_file=null"):
        status, printed = shell.run(Block("sh", "", refused))
        assert (status, printed.startswith("fermata: ")) == (3, True), printed
    shell.run(Block("sh", "", "kill %1 %2"))
    assert shell.status_of_jobs() == 0
