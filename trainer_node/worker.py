"""The one thread that works with the model.

Invariant: at any time at most one thing is done with the model, and the event loop never waits on it by blocking.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ModelThread:
    """Runs functions one after another on a thread of its own."""

    def __init__(self, torch_threads: int = 0) -> None:
        self._torch_threads = torch_threads
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="model", initializer=self._begin)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Awaits the result. Cancelling leaves the function to end by itself; what follows it waits for that."""
        future = self._pool.submit(function, *args, **kwargs)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        if self._torch_threads:
            import torch

            # OpenMP's count is kept per thread: set where the work is done.
            torch.set_num_threads(self._torch_threads)
