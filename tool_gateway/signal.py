"""A condition that many may wait for and anybody may raise, on one event loop.

Invariant: a raise wakes all who wait.
"""

from __future__ import annotations

import asyncio


class Signal:
    """Unlike an Event it has no state to clear: ``wait`` returns at the next ``raise_`` after it was called."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def raise_(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
