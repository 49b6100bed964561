"""The addresses behind a name, looked up off the event loop and within a deadline.

Invariant: at most one look-up of a name is under way, however long the system's resolver takes, and none holds up the
process's end; whatever goes wrong is a LookUpFailed with its sentence.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence

from node_runtime.addresses import join, split

LookUp = Callable[[str, int], Sequence[str]]
"""Host and port to the addresses "host:port" there are. May block; fails with an OSError, or with a ValueError for what
can be no name."""


class LookUpFailed(Exception):
    """No address is known from this look-up; the text says why."""


def look_up(host: str, port: int) -> list[str]:
    """Every A and AAAA record of the name, by the system's resolver (hosts file and search domains included)."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [join(str(address[0]), port) for _family, _kind, _protocol, _name, address in found]


class Resolver:
    """Looks one name up again and again."""

    def __init__(self, dns: str, look_up: LookUp = look_up) -> None:
        self.host, self._port = split(dns)
        self._look_up = look_up
        self._under_way: asyncio.Future[Sequence[str] | Exception] | None = None

    async def resolve(self, timeout_s: float) -> tuple[str, ...]:
        """At least one address, each once. A look-up that takes longer goes on, and answers the next ``resolve``."""
        if self._under_way is None:
            self._under_way = self._start()
        try:
            async with asyncio.timeout(timeout_s) as timer:
                answer = await asyncio.shield(self._under_way)
        except TimeoutError:
            if not timer.expired():
                raise
            raise LookUpFailed(f"no answer came within {timeout_s:g} s") from None
        self._under_way = None
        if isinstance(answer, OSError | ValueError):
            raise LookUpFailed(getattr(answer, "strerror", None) or str(answer))
        if isinstance(answer, Exception):
            raise answer
        if not answer:
            raise LookUpFailed("it has no address")
        return tuple(dict.fromkeys(answer))

    def _start(self) -> asyncio.Future[Sequence[str] | Exception]:
        """On a thread of its own: look-ups that hang must not wait for each other, nor the process's end for them."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[str] | Exception] = loop.create_future()

        def work() -> None:
            answer: Sequence[str] | Exception
            try:
                answer = self._look_up(self.host, self._port)
            except Exception as error:  # noqa: BLE001 (raised where it is awaited)
                answer = error
            try:
                loop.call_soon_threadsafe(_answer, future, answer)
            except RuntimeError:
                return  # the loop has ended meanwhile

        threading.Thread(target=work, name=f"look-up of {self.host}", daemon=True).start()
        return future


def _answer(future: asyncio.Future[Sequence[str] | Exception], answer: Sequence[str] | Exception) -> None:
    if not future.done():
        future.set_result(answer)
