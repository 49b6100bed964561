"""Is there a gateway at an address, and does it let this process in?"""

from __future__ import annotations

from collections.abc import Callable

import grpc
import grpc.aio
from fermata.v1 import gateway_pb2, gateway_pb2_grpc

from node_runtime.errors import EXIT_UNAVAILABLE, NodeError
from node_runtime.grpc_channel import open_channel, told_error, wait_ready
from node_runtime.runtime_settings import RuntimeSettings

_LIST_S = 5.0


async def wait_for_gateway(
    address: str, runtime: RuntimeSettings, *, timeout_s: float, on_wait: Callable[[str], None] | None = None
) -> gateway_pb2.ListToolsResponse:
    """What the gateway serves, once it answers. Raises NodeError (EXIT_UNAVAILABLE): after `timeout_s` seconds, and at
    once where it refuses this process's certificate or token.

    `on_wait` is given a sentence now and then while nobody answers.
    """
    channel = open_channel(address, runtime)
    try:
        await wait_ready(channel, address, runtime, timeout_s=timeout_s, what="a tool gateway", on_wait=on_wait)
        stub = gateway_pb2_grpc.ToolGatewayServiceStub(channel)
        return await stub.ListTools(gateway_pb2.ListToolsRequest(), timeout=_LIST_S)
    except grpc.aio.AioRpcError as error:
        why, refused = await told_error(error, address, runtime)
        said = f"tool gateway: {why}" if refused else f"the gateway at {address} did not list its tools: {why}"
        raise NodeError(said, EXIT_UNAVAILABLE) from None
    finally:
        await channel.close()
