"""The public interface of the gateway client, as the rollout node codes against it.

``tool_gateway.client.ToolGateway(addresses, *, runtime, run_id, node_id, session_id=None, options=ClientOptions())``
is the implementation; ``ToolCaller`` is what of it a trajectory needs, so that a caller can name the dependency
without naming sockets. Invariant: ``call`` returns exactly one ``Result``, at its deadline at the latest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from fermata.v1 import tool_pb2

from node_runtime.keys import CallKey
from tool_gateway.client.types import CallOptions, OnEvent, Pending, Result


class ToolCaller(Protocol):
    """Calls tools through a gateway. Infrastructure faults are results like any other, never exceptions."""

    @property
    def connected(self) -> bool:
        """Whether a gateway has welcomed this client and the stream is alive."""
        ...

    @property
    def catalogue(self) -> Mapping[str, tool_pb2.ToolSpec]:
        """Name → spec of every tool (MODEL and GRADER) the gateway has told of; the mapping is replaced on change."""
        ...

    async def call(
        self,
        *,
        key: CallKey | str,
        tool: str,
        args_json: bytes,
        deadline_s: float,
        on_event: OnEvent | None = None,
        options: CallOptions | None = None,
    ) -> Result:
        """Run one call to its end. Returns within ``deadline_s`` seconds whatever becomes of the gateway.

        A second call with a key in flight joins the first (KEY_CONFLICT where its arguments differ). Cancelling the
        awaiting task cancels the call at the tool, unless another caller has joined it.
        """
        ...

    def cancel(self, key: CallKey | str, reason: str = "") -> None:
        """Stop a call; its ``call`` returns CANCELLED/CALLER (or the result, where that was quicker)."""
        ...

    def release(self, keys: Iterable[CallKey | str]) -> None:
        """The trainer holds a durable snapshot with these results: the gateway may forget them."""
        ...

    def release_trajectory(self, trajectory_id: str, generation: int) -> None:
        """As ``release``, for all calls of the trajectory up to and including ``generation``."""
        ...

    def fence(self, trajectory_id: str, generation: int, keep_keys: Iterable[CallKey | str] = ()) -> None:
        """A new generation owns the trajectory: calls of older ones not named are cancelled, their writers FENCED."""
        ...

    def pending(self, trajectory_id: str | None = None) -> list[Pending]:
        """Unresolved calls (of one trajectory), with what a snapshot must know of them."""
        ...
