"""gRPC statuses of a backend's RPC in the words of the policy.

Invariant: an error is only called "not started" where it proves that the tool's code cannot have begun.
"""

from __future__ import annotations

import grpc
from fermata.v1 import tool_pb2

from node_runtime.grpc_channel import error_sentence
from node_runtime.outcomes import make_final
from tool_gateway.policy import AttemptEnd, Finished, Lost

_REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED: tool_pb2.OUTCOME_PERMISSION,
    grpc.StatusCode.PERMISSION_DENIED: tool_pb2.OUTCOME_PERMISSION,
    grpc.StatusCode.UNIMPLEMENTED: tool_pb2.OUTCOME_PROTOCOL,
}


def end_of_error(error: grpc.aio.AioRpcError, address: str) -> AttemptEnd:
    """What an RPC error says of the attempt. All but refusals count as lost: whether it ran is asked afterwards."""
    outcome = _REFUSED.get(error.code())
    sentence = f"the backend at {address} answered {error_sentence(error)}"
    if outcome is not None:
        return Finished(make_final(outcome, detail=sentence, started=tool_pb2.STARTED_NO))
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Finished(make_final(tool_pb2.OUTCOME_OVERLOADED, detail=sentence, started=tool_pb2.STARTED_UNKNOWN))
    return Lost(sentence)
