"""The gateway clients of a node, one per run.

Invariant: a client lives as long as its run is the node's. A node that leaves after handing trajectories over says no
final goodbye, so that their calls run on for the next owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from node_runtime.errors import EXIT_UNAVAILABLE, NodeError
from node_runtime.logs import get_logger
from node_runtime.runtime_settings import RuntimeSettings
from rollout_node.ports import ToolCaller
from tool_gateway.client import ToolGateway, wait_for_gateway

log = get_logger("rollout_node.gateways")


class RunGateways:
    def __init__(self, addresses: Sequence[str], runtime: RuntimeSettings, node_id: str) -> None:
        self._addresses = tuple(addresses)
        self._runtime = runtime
        self._node_id = node_id
        self._run_id = ""
        self._client: ToolGateway | None = None
        self._lock = asyncio.Lock()

    async def of_run(self, run_id: str) -> ToolCaller:
        """The client of a run; the one of the run before is closed."""
        async with self._lock:
            if self._client is not None and self._run_id != run_id:
                await self._client.close()
                self._client = None
            if self._client is None:
                client = ToolGateway(self._addresses, runtime=self._runtime, run_id=run_id, node_id=self._node_id)
                self._client, self._run_id = await client.__aenter__(), run_id
            return self._client

    async def close(self, *, keep_calls: bool) -> None:
        """`keep_calls`: trajectories were handed over, their calls are another owner's."""
        async with self._lock:
            client, self._client = self._client, None
            if client is not None:
                await (client.leave() if keep_calls else client.close())


async def wait_for_any_gateway(
    addresses: Sequence[str], runtime: RuntimeSettings, *, timeout_s: float, on_wait: Callable[[str], None]
) -> None:
    """Until one of the gateways answers and lets this node in. NodeError (EXIT_UNAVAILABLE) where none does in time."""
    tasks = [
        asyncio.create_task(
            wait_for_gateway(address, runtime, timeout_s=timeout_s, on_wait=on_wait), name=f"wait for {address}"
        )
        for address in addresses
    ]
    try:
        failures: list[str] = []
        for finished in asyncio.as_completed(tasks):
            try:
                await finished
            except NodeError as error:
                failures.append(str(error))
            else:
                return
        raise NodeError("\n".join(failures), EXIT_UNAVAILABLE)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
