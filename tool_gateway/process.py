"""The gateway process: everything built once, run until stopped, drained, and closed.

Invariant: the port answers before any backend does, and after SIGTERM no new call is begun while those in flight get
``gateway.drain_s`` to end.
"""

from __future__ import annotations

import asyncio
import secrets
import socket

from fermata.v1 import gateway_pb2, tool_pb2
from fermata.v1.gateway_pb2_grpc import add_ToolGatewayServiceServicer_to_server

from node_runtime.errors import NodeError
from node_runtime.grpc_server import NodeServer
from node_runtime.logs import get_logger
from node_runtime.metrics import start_metrics, stop_metrics
from node_runtime.process import Lifetime
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.spans import SpanWriter
from tool_gateway.backends import Backends
from tool_gateway.backends.resolver import LookUp, look_up
from tool_gateway.dispatcher import Dispatcher
from tool_gateway.hub import SessionHub
from tool_gateway.ledger import LedgerStore, LedgerUnavailable, open_ledger
from tool_gateway.metrics import DRAINING, EVENT_LOOP_LAG, OLDEST_CALL_AGE
from tool_gateway.service import SERVICE, GatewayService
from tool_gateway.settings import GatewaySettings

_log = get_logger(__name__)
ServerFrame = gateway_pb2.ServerFrame
SWEEP_S = 1.0
CLOSE_S = 2.0


async def serve(
    settings: GatewaySettings, runtime: RuntimeSettings, lifetime: Lifetime, look_up: LookUp = look_up
) -> None:
    """Runs the gateway until `lifetime.stopping`. Raises NodeError where a port or the ledger cannot be had."""
    gateway_id = settings.gateway_id or runtime.node_name or f"gateway-{socket.gethostname()}"
    backends = Backends(settings.pools, runtime, settings.timeouts, look_up=look_up)
    hub = SessionHub(settings)
    async with open_ledger(settings) as ledger:
        with SpanWriter(runtime.spans_dir, gateway_id) as spans:
            dispatcher = Dispatcher(settings, ledger, backends, hub, spans)
            service = GatewayService(settings, gateway_id, secrets.token_hex(8), backends, hub, dispatcher)
            server = NodeServer(runtime, settings.host, settings.port, what="gateway")
            add_ToolGatewayServiceServicer_to_server(service, server.server)
            server.register(SERVICE)
            EVENT_LOOP_LAG.set_function(lifetime.health.lag_s)
            metrics_port = start_metrics(runtime, lifetime.health)
            try:
                port = await server.start()
                async with asyncio.TaskGroup() as tasks:
                    background = [
                        tasks.create_task(backends.run(), name="backends"),
                        tasks.create_task(dispatcher.run(), name="dispatcher"),
                        tasks.create_task(service.tell_catalogue(), name="catalogue"),
                        tasks.create_task(_sweep(hub, ledger, dispatcher), name="sweep"),
                        tasks.create_task(_end_without(ledger), name="ledger"),
                    ]
                    if not settings.pools:
                        _log.warning("gateway.pools is empty: no tool can be called; name backends there")
                    lifetime.ready(port=port, metrics_port=metrics_port)
                    await lifetime.stopping.wait()
                    await _drain(settings, runtime, server, hub, dispatcher)
                    for task in background:
                        task.cancel()
            finally:
                await backends.close()
                stop_metrics(metrics_port)


async def _sweep(hub: SessionHub, ledger: LedgerStore, dispatcher: Dispatcher) -> None:
    loop = asyncio.get_running_loop()
    while True:
        OLDEST_CALL_AGE.set(dispatcher.oldest_age_s())
        await asyncio.sleep(SWEEP_S)
        try:
            expired = await ledger.sweep(loop.time())
        except LedgerUnavailable:  # the store has told it
            expired = 0
        forgotten = hub.expire(loop.time())
        if expired or forgotten:
            _log.info("expired", results=expired, sessions=len(forgotten))


async def _end_without(ledger: LedgerStore) -> None:
    raise NodeError(f"the gateway cannot go on without its ledger: {await ledger.lost()}")


async def _drain(
    settings: GatewaySettings, runtime: RuntimeSettings, server: NodeServer, hub: SessionHub, dispatcher: Dispatcher
) -> None:
    """Tell clients, refuse new calls, let the running ones end, hand out their results, end the streams."""
    within_s = max(0.0, min(settings.drain_s, runtime.shutdown_grace_s - 2 * CLOSE_S))
    dispatcher.draining = True
    DRAINING.set(1)
    server.set_serving(SERVICE, False)
    drain = ServerFrame.Drain(
        deadline_ms=int(within_s * 1000), reconnect_in_ms=0, reason="the gateway was asked to stop"
    )
    for attached in hub.streams:
        attached.say(ServerFrame.Event(drain=drain))
    _log.info("draining", calls=len(dispatcher.running), streams=len(hub.streams), within_s=within_s)
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    try:
        async with asyncio.timeout_at(until):
            await dispatcher.wait_idle()
    except TimeoutError:
        _log.warning("calls are left to a successor", calls=len(dispatcher.running))
    await _until_acknowledged(hub, loop.time() + CLOSE_S)
    for attached in hub.streams:
        attached.end(
            ServerFrame.Goodbye(
                outcome=tool_pb2.OUTCOME_OVERLOADED,
                fault=tool_pb2.FAULT_INFRA,
                detail="the gateway leaves",
                reconnect=True,
            )
        )
    await server.stop(CLOSE_S)


async def _until_acknowledged(hub: SessionHub, until: float) -> None:
    """Results that just came are worth a moment: wait for the clients that have a stream to acknowledge them."""
    try:
        async with asyncio.timeout_at(until):
            while any(attached.session.unacked for attached in hub.streams):
                await hub.acked.wait()
    except TimeoutError:
        return  # who did not acknowledge will ask the successor
