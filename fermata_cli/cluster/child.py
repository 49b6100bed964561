"""One process of a cluster, from its start to its end.

Invariants: it has a process group of its own (a terminal's Ctrl-C reaches only the command, which stops it in order)
and a log file of its own; once `stop` or `kill` is done nothing of its group runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fermata_cli import proc
from fermata_cli.cluster.plan import ProcessSpec
from fermata_cli.text import printable
from node_runtime import addresses
from node_runtime.errors import EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_USAGE, NodeError

_LEFTOVERS_S = 3.0
_STARTING_S = 4.0
_TAIL_BYTES = 16_384
_LINE_BYTES = 1 << 20


class Child:
    """Made by `start`. `ready` is what its ready line said; `ended` is done once the process has ended."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, log: Path, host: str) -> None:
        self.spec = spec
        self.host = host
        self.log = log
        self.ready: Mapping[str, Any] = {}
        self._process = process
        self.ended: asyncio.Task[int] = asyncio.create_task(process.wait(), name=f"end of {spec.name}")
        self._output: asyncio.Task[None] | None = None
        self.stopping = False

    @classmethod
    async def start(
        cls, spec: ProcessSpec, command: list[str], log: Path, env: Mapping[str, str], host: str = "127.0.0.1"
    ) -> Child:
        """Call in the main thread: the kernel ends the process when the thread that started it ends.

        `host`: what its settings tell it to listen on.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=dict(env),
                process_group=0,
                limit=_LINE_BYTES,
            )
        return cls(spec, process, log, host)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def address(self) -> str:
        """Where this machine reaches it."""
        return addresses.join(addresses.reached_at(self.host), self.ready["port"])

    @property
    def metrics_port(self) -> int | None:
        return self.ready.get("metrics_port")

    async def wait_ready(self, timeout_s: float) -> None:
        """Raises NodeError where the process ends first, or takes longer."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready:
                    line = await self._process.stdout.readline()
                    if not line:
                        await self.ended
                        raise self.death()
                    self.ready = _ready(line)
        except TimeoutError:
            late = f"the {self.what} was not ready within {timeout_s:g} s of its start"
            raise NodeError(f"{late}{self._last_words()} (log: {self.log})", EXIT_UNAVAILABLE) from None
        self._output = asyncio.create_task(self._copy_output(), name=f"output of {self.spec.name}")

    async def _copy_output(self) -> None:
        """What else it prints goes to its log; a full pipe would hold it up."""
        assert self._process.stdout is not None
        with self.log.open("ab") as log:
            while data := await self._process.stdout.read(1 << 16):
                log.write(data)
                log.flush()

    @property
    def what(self) -> str:
        role = self.spec.role.value
        return role if role == self.spec.name else f"{role} {self.spec.name}"

    def death(self) -> NodeError:
        """How it ended, with its own last words and the exit code they came with."""
        code = self.ended.result()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        passed_on = code if code in (EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_FAILED) else EXIT_FAILED
        return NodeError(f"the {self.what} (process {self.pid}) {how}{self._last_words()} (log: {self.log})", passed_on)

    def _last_words(self) -> str:
        """The sentences it ended with, else its last lines."""
        lines = tail(self.log)
        prefix = f"{self.spec.arguments[0]}: "
        said = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        words = list(dict.fromkeys(said))[-3:] or lines[-5:]  # one started again has those of the last one before it
        return "".join(f": {word}" if at == 0 else f"\n  {word}" for at, word in enumerate(words))

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, then after `grace_s` SIGKILL to all that is left. False where one that was up had to be killed."""
        self.stopping = True
        orderly = True
        if not self.ended.done():
            self._signal(signal.SIGTERM)
            # Who is not up yet has nothing to hand over, and an engine that loads takes no heed of signals.
            await asyncio.wait((self.ended,), timeout=grace_s if self.ready else min(grace_s, _STARTING_S))
            if not self.ended.done():
                orderly = not self.ready
                # Only the process itself: its helpers notice, and clean up what it shared with them.
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        if not await self._group_ends(_LEFTOVERS_S):
            orderly = False
            self.kill()
        await self.ended
        if self._output is not None:
            await asyncio.wait((self._output,), timeout=_LEFTOVERS_S)
            self._output.cancel()
            await asyncio.gather(self._output, return_exceptions=True)
        return orderly

    async def _group_ends(self, timeout_s: float) -> bool:
        """An engine's helpers end a moment after the node itself."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while proc.group_alive(self.pid):
            if loop.time() >= until:
                return False
            await asyncio.sleep(0.05)
        return True

    def kill(self) -> None:
        """SIGKILL to the whole group, at once."""
        self.stopping = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # all ended by themselves


def _ready(line: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("ready") is True else {}


def tail(path: Path, lines: int = 20) -> list[str]:
    """The last lines of a log, without what is empty, fit for a terminal."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [printable(line, 600) for line in text.splitlines() if line.strip()][-lines:]
