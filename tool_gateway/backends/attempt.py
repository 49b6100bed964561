"""The I/O of one attempt: invoke, attach, cancel. Every RPC ends in an AttemptEnd or an Answer, never in an exception.

Invariant: no RPC outlives the coroutine that made it; time that runs out here is told to the backend by a Cancel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
from fermata.v1 import tool_pb2

from node_runtime.grpc_channel import error_sentence
from tool_gateway.backends.backend import Backend
from tool_gateway.backends.rpc import end_of_error
from tool_gateway.policy import Absent, AttemptEnd, Finished, InstanceGone, Lost, NotSent, TimedOut
from tool_gateway.takeover import Answer, Found, NotThere, Unreachable

OnCallEvent = Callable[[tool_pb2.CallEvent], None]


async def invoke(
    backend: Backend,
    invocation: tool_pb2.Invocation,
    *,
    timeout_s: float,
    heartbeat_s: float,
    on_event: OnCallEvent,
) -> AttemptEnd:
    """Run the invocation at the instance it names. The local timer is `timeout_s`; the invocation carries its own."""
    if backend.instance_id != invocation.expected_instance_id or not backend.reachable:
        return NotSent(f"the backend at {backend.address} was lost before the call was sent")
    if "invoke_stream" not in backend.features:
        return await _invoke_unary(backend, invocation, timeout_s)
    request = tool_pb2.InvokeStreamRequest(invocation=invocation)
    stream = backend.stub.InvokeStream(request)
    return await _follow(stream, _event_of_invoke, timeout_s, heartbeat_s, on_event, backend.address)


async def attach(
    backend: Backend,
    *,
    key: str,
    args_sha256: bytes,
    instance_id: str,
    tombstone: bool,
    timeout_s: float,
    heartbeat_s: float,
    on_event: OnCallEvent,
) -> AttemptEnd:
    """Rejoin the call at the instance that was invoked, or learn that it is not there."""
    request = tool_pb2.AttachRequest(
        key=key,
        args_sha256=args_sha256,
        expected_instance_id=instance_id,
        if_absent=tool_pb2.AttachRequest.IF_ABSENT_TOMBSTONE if tombstone else tool_pb2.AttachRequest.IF_ABSENT_FAIL,
        heartbeat_timeout_ms=int(heartbeat_s * 1000),
    )
    stream = backend.stub.Attach(request)
    return await _follow(stream, _event_of_attach, timeout_s, heartbeat_s, on_event, backend.address)


async def ask(
    backend: Backend,
    *,
    key: str,
    args_sha256: bytes,
    tombstone: bool,
    timeout_s: float,
    age_s: Callable[[], float],
) -> Answer:
    """Whether this backend knows the key, for a takeover; with `tombstone` it never starts there afterwards."""
    if "attach" not in backend.features:
        return Unreachable("it has no Attach")
    request = tool_pb2.AttachRequest(
        key=key,
        args_sha256=args_sha256,
        if_absent=tool_pb2.AttachRequest.IF_ABSENT_TOMBSTONE if tombstone else tool_pb2.AttachRequest.IF_ABSENT_FAIL,
    )
    stream = backend.stub.Attach(request)
    try:
        async with asyncio.timeout(timeout_s):
            async for response in stream:
                if response.WhichOneof("result") == "absent":
                    absent = response.absent
                    return NotThere(
                        absent.instance_id,
                        absent.tombstoned,
                        uptime_s=absent.uptime_ms / 1000,
                        age_s=age_s(),
                        retention_s=backend.retention_s,
                        expired=absent.expired,
                    )
                return Found()
            return Unreachable("it ended Attach without an answer")
    except grpc.aio.AioRpcError as error:
        return Unreachable(error_sentence(error))
    except asyncio.InvalidStateError:
        return Unreachable("the connection was closed")
    except TimeoutError:
        return Unreachable(f"it gave no answer within {timeout_s:.1f} s")
    finally:
        stream.cancel()


async def cancel(backend: Backend, key: str, reason: str, timeout_s: float) -> str | None:
    """Tell the backend to stop the call. Returns why that failed, or None."""
    try:
        with backend.held():
            await backend.stub.Cancel(tool_pb2.CancelRequest(key=key, reason=reason), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return error_sentence(error)
    except (asyncio.InvalidStateError, grpc.aio.UsageError):
        return "the connection was closed"
    return None


async def _invoke_unary(backend: Backend, invocation: tool_pb2.Invocation, timeout_s: float) -> AttemptEnd:
    try:
        async with asyncio.timeout(timeout_s):
            response = await backend.stub.Invoke(tool_pb2.InvokeRequest(invocation=invocation))
    except grpc.aio.AioRpcError as error:
        return end_of_error(error, backend.address)
    except asyncio.InvalidStateError:
        return Lost(f"the connection to {backend.address} was closed")
    except TimeoutError:
        return TimedOut(f"the backend at {backend.address} gave no result within the attempt's {timeout_s:.1f} s")
    return Finished(response.final)


def _event_of_invoke(response: tool_pb2.InvokeStreamResponse, address: str) -> tool_pb2.CallEvent | AttemptEnd:
    return response.event


def _event_of_attach(response: tool_pb2.AttachResponse, address: str) -> tool_pb2.CallEvent | AttemptEnd:
    if response.WhichOneof("result") != "absent":
        return response.event
    if response.absent.instance_mismatch:
        return InstanceGone(f"another instance, {response.absent.instance_id}, answers at {address} now")
    return Absent(response.absent.tombstoned, response.absent.expired)


async def _follow(
    stream: Any,
    event_of: Callable[[Any, str], tool_pb2.CallEvent | AttemptEnd],
    timeout_s: float,
    heartbeat_s: float,
    on_event: OnCallEvent,
    address: str,
) -> AttemptEnd:
    """Reads until the Final. One timer serves both times: each event moves it on, never past the attempt's end. When it
    fires it ends the RPC, which is wanted."""
    loop = asyncio.get_running_loop()
    end_at = loop.time() + timeout_s
    joined = False
    try:
        async with asyncio.timeout_at(min(end_at, loop.time() + heartbeat_s)) as timer:
            async for response in stream:
                timer.reschedule(min(end_at, loop.time() + heartbeat_s))
                event = event_of(response, address)
                if not isinstance(event, tool_pb2.CallEvent):
                    return event
                joined = True
                kind = event.WhichOneof("event")
                if kind == "final":
                    return Finished(event.final)
                if kind in ("progress", "chunk"):
                    on_event(event)
        return Lost(f"the backend at {address} ended the stream without a result", joined)
    except grpc.aio.AioRpcError as error:
        end = end_of_error(error, address)
        return replace(end, joined=joined) if isinstance(end, Lost) else end
    except asyncio.InvalidStateError:
        return Lost(f"the connection to {address} was closed", joined)
    except TimeoutError:
        if loop.time() >= end_at - 0.002:  # loop clocks tick in milliseconds
            return TimedOut(f"the backend at {address} gave no result within the attempt's {timeout_s:.1f} s")
        return TimedOut(f"the backend at {address} was silent for its {heartbeat_s:.1f} s", heartbeat=True)
    finally:
        stream.cancel()
