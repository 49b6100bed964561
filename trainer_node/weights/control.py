"""One node's control channel during a sync: the RPCs, bounded, with every failure as one sentence.

Invariant: `Lost` means that the node did not answer (gone, frozen, cut off); `Refused` that it answered and said no.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from fermata.v1 import tool_pb2, weights_pb2_grpc
from fermata.v1 import weights_pb2 as pb

from node_runtime.grpc_channel import error_sentence

# The node's own deadline ends first, so that its sentence arrives.
MARGIN_S = 2.0


class Lost(Exception):
    """No answer from the node."""


class Refused(Exception):
    """The node said no; `response` is all it said."""

    def __init__(self, sentence: str, response: Any) -> None:
        super().__init__(sentence)
        self.response = response


class NodeControl:
    """The weight sync service of one node."""

    def __init__(self, node: str, channel: grpc.aio.Channel) -> None:
        self.node = node
        self.channel = channel
        self.workers = 0
        self.generation = 0  # of the group it is in
        self._stub = weights_pb2_grpc.WeightSyncServiceStub(channel)

    async def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """The response; raises Lost or Refused."""
        call = getattr(self._stub, method)(request, timeout=timeout_s + MARGIN_S)
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            raise Lost(f"{self.node} did not answer {method} ({error_sentence(error)})") from error
        finally:
            call.cancel()
        if response.status.outcome != tool_pb2.OUTCOME_OK:
            raise Refused(f"{self.node} answered {method}: {response.status.detail}", response)
        return response

    async def find(self, backend: pb.TransferBackend.ValueType, timeout_s: float) -> None:
        """Is it there, and can it take part? Learns how many workers it has."""
        status = await self.call("Status", pb.StatusRequest(), timeout_s)
        name = pb.TransferBackend.Name(backend).removeprefix("TRANSFER_BACKEND_").lower()
        if name not in status.backends:
            raise Refused(f"{self.node} has no transfer backend {name}: it has {', '.join(status.backends)}", status)
        self.workers = status.workers
        self.generation = status.group_generation
