"""What the pool tells of backends that come and change."""

from __future__ import annotations

from fermata.v1 import tool_pb2
from prometheus_client import REGISTRY

from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.backends import Backends
from tool_gateway.settings import PoolSettings, TimeoutSettings


async def test_a_tool_that_nobody_serves_any_more_is_shown_with_no_backend() -> None:
    pools = [PoolSettings(name="p", addresses=("127.0.0.1:1",))]
    backends = Backends(pools, RuntimeSettings(), TimeoutSettings())
    try:
        backend = backends.backends["127.0.0.1:1"]
        backend._connected = backend._serving = True
        for tools, serving in (("old", 1), ("new", 0)):
            spec = tool_pb2.ToolSpec(name=tools, version_hash="1")
            backend.described = tool_pb2.DescribeResponse(instance_id=tools, tools=[spec])
            backends._on_change()
            shown = REGISTRY.get_sample_value("fermata_gateway_backend_serving", {"tool": "old"})
            assert shown == serving
    finally:
        await backends.close()
