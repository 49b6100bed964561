"""How a connection to a gateway came to its end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio


class Dead(Exception):
    """The connection is given up by us."""


def ended_by(*tasks: asyncio.Task[Any]) -> BaseException | None:
    """What ended the connection, where it was an error; those of ours are raised."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(
                error, grpc.aio.AioRpcError | asyncio.InvalidStateError | grpc.aio.BaseError | TimeoutError | Dead
            ):
                return error
            raise error
    return None
