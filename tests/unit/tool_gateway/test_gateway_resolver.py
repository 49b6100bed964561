"""Looking a name up: off the loop, within a deadline, never twice at a time."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest

from tool_gateway.backends.resolver import LookUpFailed, Resolver, look_up


async def test_every_address_once_in_the_order_given() -> None:
    resolver = Resolver("name:7", lambda host, port: [f"{host}:{port}", "b:1", "b:1"])
    assert await resolver.resolve(5) == ("name:7", "b:1")


async def test_the_systems_resolver_knows_loopback() -> None:
    assert "127.0.0.1:7020" in look_up("localhost", 7020)
    assert look_up("::1", 7020) == ["[::1]:7020"]
    with pytest.raises(LookUpFailed, match=r"."):
        await Resolver("no-such-name.invalid:1").resolve(20)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (OSError("odd"), "odd"),
        (UnicodeError("label too long"), "label too long"),
        (ValueError("embedded null character"), "embedded null"),
        (None, "it has no address"),
    ],
)
async def test_a_failure_is_one_sentence_and_the_next_look_up_is_a_new_one(error: Exception | None, said: str) -> None:
    tries = 0

    def fails_first(host: str, port: int) -> Sequence[str]:
        nonlocal tries
        tries += 1
        if tries > 1:
            return ["a:1"]
        if error is not None:
            raise error
        return []

    resolver = Resolver("name:7", fails_first)
    with pytest.raises(LookUpFailed, match=said):
        await resolver.resolve(5)
    assert await resolver.resolve(5) == ("a:1",)


async def test_one_that_hangs_is_waited_for_no_longer_than_its_time_and_never_doubled() -> None:
    go_on, under_way = threading.Event(), []

    def hangs(host: str, port: int) -> Sequence[str]:
        under_way.append(host)
        go_on.wait(20)
        return [f"late:{len(under_way)}"]

    resolver = Resolver("name:7", hangs)
    beats = 0
    for _ in range(3):
        with pytest.raises(LookUpFailed, match=r"no answer came within 0\.02 s"):
            await resolver.resolve(0.02)
        beats += 1
    assert (beats, under_way) == (3, ["name"])
    go_on.set()
    assert await resolver.resolve(20) == ("late:1",), "what it found is taken when it comes"
    assert await resolver.resolve(20) == ("late:2",)


async def test_a_cancelled_wait_leaves_the_look_up_to_the_next() -> None:
    go_on = threading.Event()

    def waits(host: str, port: int) -> Sequence[str]:
        go_on.wait(20)
        return ["a:1"]

    resolver = Resolver("name:7", waits)
    waiting = asyncio.create_task(resolver.resolve(20))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    assert await resolver.resolve(20) == ("a:1",)


def test_a_process_ends_without_waiting_for_a_look_up_that_hangs() -> None:
    program = """
import asyncio, threading
from tool_gateway.backends.resolver import LookUpFailed, Resolver
async def main():
    try:
        await Resolver("name:7", lambda host, port: threading.Event().wait()).resolve(0.01)
    except LookUpFailed:
        print("told")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "told\n", "")
