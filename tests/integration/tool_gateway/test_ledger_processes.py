"""The SQLite ledger in real processes: killed in the middle of writing, two at one folder, one that may not write."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fermata.v1 import gateway_pb2

from node_runtime.errors import EXIT_UNAVAILABLE, EXIT_USAGE, NodeError
from tests.support.ledgers import record
from tool_gateway.ledger import Created, Creation, Gone, SqliteLedger
from tool_gateway.ledger.sqlite_file import FILE_NAME
from tool_gateway.settings import LedgerSettings

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).resolve().parents[3]
IMPORTS = """
import asyncio, os, sys
from pathlib import Path
from tests.support.ledgers import ending, record
from tool_gateway.ledger import AttemptRecord, SqliteLedger
from tool_gateway.settings import LedgerSettings
"""
WRITE = """
async def life(ledger, worker):
    for n in range(100_000):
        made = record(n, trajectory=f"t{worker}", deadline_at=1e9)
        steps = [
            ("created", lambda: ledger.create(made)),
            ("begun", lambda: ledger.begin_attempt(made.key, AttemptRecord(1, "i", "a:1", 0.0))),
            ("finished", lambda: ledger.finish(made.key, ending(made.key * 50), 1e9)),
            ("acked", lambda: ledger.ack("s", [made.key])),
            ("released", lambda: ledger.release("run", [made.key])),
        ]
        for said, step in steps[: 5 if n % 2 else 1 + n % 5]:
            await step()
            print(made.key, said, flush=True)

async def main():
    async with SqliteLedger(Path(sys.argv[1]), LedgerSettings(synchronous=sys.argv[2])) as ledger:
        await asyncio.gather(*(life(ledger, worker) for worker in range(32)))

asyncio.run(main())
"""
HOLD = """
async def main():
    async with SqliteLedger(Path(sys.argv[1]), LedgerSettings()):
        print("open", flush=True)
        await asyncio.Event().wait()

if os.geteuid() == 0 and sys.argv[2] == "nobody":
    os.setresuid(65534, 65534, 65534)
try:
    asyncio.run(main())
except Exception as error:
    print(error.exit_code, error)
"""
SAID = ("created", "begun", "finished", "acked", "released")


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'protos'}"}
    command = [sys.executable, "-c", IMPORTS + script, *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("synchronous", ["normal", "full"])
def test_kill_9_in_the_middle_of_writing_loses_nothing_that_was_acknowledged(tmp_path: Path, synchronous: str) -> None:
    said: dict[str, int] = {}
    for lines in (100, 1500):  # the second time on what the first has left
        with start(WRITE, str(tmp_path), synchronous) as writer:
            assert writer.stdout is not None
            for number, line in enumerate(writer.stdout):
                if number == lines:
                    writer.kill()
                if line.endswith("\n"):  # the last may be half a line
                    key, what = line.split()
                    said[key] = max(said.get(key, 0), SAID.index(what))
        assert len(said) > lines / 10
        asyncio.run(all_hold(tmp_path, said))


async def all_hold(folder: Path, said: dict[str, int]) -> None:
    async with SqliteLedger(folder, LedgerSettings()) as ledger:
        for key, most in said.items():
            await holds(ledger, key, SAID[most])


async def holds(ledger: SqliteLedger, key: str, said: str) -> None:
    """At least what was said of the key: the step after it may have been committed, too."""
    held = await ledger.load(key)
    if isinstance(held, Gone):
        assert said in ("acked", "released")
        assert held.state == gateway_pb2.GetCallResponse.CALL_STATE_RELEASED
        return
    assert held is not None, f"{key} was {said} and is lost"
    assert said != "released"
    assert held.attempts or said == "created"
    assert held.acked or said != "acked"
    if held.done:
        assert held.to_result().final.parts[0].text == (key * 50).encode()
    else:
        assert said in ("created", "begun")


async def create(folder: Path) -> Creation:
    async with SqliteLedger(folder, LedgerSettings()) as ledger:
        return await ledger.create(record())


def test_a_second_gateway_on_the_same_folder_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    with start(HOLD, str(tmp_path), "") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "open\n"
        with pytest.raises(NodeError, match="in use by another gateway: give each gateway a folder of its own") as told:
            asyncio.run(create(tmp_path))
        assert told.value.exit_code == EXIT_UNAVAILABLE
        first.kill()
    assert isinstance(asyncio.run(create(tmp_path)), Created)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_may_not_be_written_is_named(what: str) -> None:
    """As nobody, where these tests are root: nothing is forbidden to root."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE_NAME
        if what == "file":
            asyncio.run(create(Path(folder)))
            path.chmod(0o444)
        Path(folder).chmod(0o555)
        with start(HOLD, folder, "nobody") as refused:
            told, _ = refused.communicate(timeout=30)
        assert told.startswith(f"{EXIT_USAGE} gateway.data_dir: {path} cannot be written ("), told
        assert len(told.splitlines()) == 1
