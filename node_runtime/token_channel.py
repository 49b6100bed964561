"""A channel that shows our token with every call.

Invariant: metadata is added where a call is made and nowhere else: the call object is gRPC's own. (A client interceptor
would wrap the long stream and cost on each message.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

Pairs = tuple[tuple[str, str | bytes], ...]


class _WithMetadata:
    """A multi-callable whose calls carry `pairs` before the caller's own metadata."""

    __slots__ = ("_inner", "_pairs")

    def __init__(self, inner: Callable[..., Any], pairs: Pairs) -> None:
        self._inner = inner
        self._pairs = pairs

    def __call__(self, *args: Any, metadata: Sequence[tuple[str, str | bytes]] | None = None, **kwargs: Any) -> Any:
        return self._inner(*args, metadata=(*self._pairs, *(metadata or ())), **kwargs)


class TokenChannel(grpc.aio.Channel):
    """Delegates to `inner`, adding `pairs` to the metadata of each call."""

    def __init__(self, inner: grpc.aio.Channel, pairs: Pairs) -> None:
        self._inner = inner
        self._pairs = pairs

    async def __aenter__(self) -> TokenChannel:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        await self._inner.__aexit__(exc_type, exc, traceback)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _WithMetadata(self._inner.unary_unary(*args, **kwargs), self._pairs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _WithMetadata(self._inner.unary_stream(*args, **kwargs), self._pairs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _WithMetadata(self._inner.stream_unary(*args, **kwargs), self._pairs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _WithMetadata(self._inner.stream_stream(*args, **kwargs), self._pairs)
