"""The rollout node's process: model, gateway, engine, then the server; and back in the opposite order.

Invariant: the ready line is printed once everything serves; whatever cannot be had ends the process with one sentence
and no child left behind; at SIGTERM trajectories finish their turn or are handed over within the grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from fermata.v1 import rollout_pb2_grpc, weights_pb2_grpc

from node_runtime import addresses, process
from node_runtime.errors import EXIT_FAILED, NodeError
from node_runtime.grpc_server import NodeServer
from node_runtime.logs import get_logger
from node_runtime.metrics import start_metrics, stop_metrics
from node_runtime.process import Lifetime
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import load_for_process
from node_runtime.spans import SpanWriter
from rollout_node import metrics
from rollout_node.gateways import RunGateways, wait_for_any_gateway
from rollout_node.loop import NodeLoop
from rollout_node.outbox import Outbox
from rollout_node.service import RolloutNodeServicer
from rollout_node.settings import RolloutSettings

SERVICE = "fermata.v1.RolloutNodeService"
WEIGHT_SERVICE = "fermata.v1.WeightSyncService"
_CLOSE_SHARE = 0.6  # of the grace, for trajectories; the rest closes engine and server

log = get_logger("rollout_node.main")


async def serve(lifetime: Lifetime, settings: RolloutSettings) -> None:
    """From nothing to serving, until the first signal."""
    runtime = lifetime.runtime
    node_id = runtime.node_name or f"rollout-{socket.gethostname()}-{uuid.uuid4().hex[:6]}"
    addresses.check_free(settings.host, settings.port, "rollout node", "rollout.port")
    metrics_port = start_metrics(runtime, lifetime.health)
    metrics.GPUS.start()

    def tell_waiting(sentence: str) -> None:
        log.info(sentence)
        lifetime.health.waiting(sentence)

    try:
        lifetime.health.waiting("the chat template and the tokenizer are being loaded")
        turns = await _unless_stopped(lifetime, asyncio.to_thread(_load_turns, settings))
        await _unless_stopped(
            lifetime,
            wait_for_any_gateway(settings.gateway, runtime, timeout_s=settings.gateway_wait_s, on_wait=tell_waiting),
        )
        lifetime.health.waiting("the engine is loading the model")
        with SpanWriter(runtime.spans_dir, node_id) as spans:
            async with _engine(lifetime, settings) as engine:
                await _serve_with(lifetime, settings, engine, turns, spans, node_id, metrics_port)
    except _Stopped:
        log.info("stopped before it served")
    finally:
        metrics.GPUS.stop()
        stop_metrics(metrics_port)


async def _serve_with(
    lifetime: Lifetime,
    settings: RolloutSettings,
    engine: Any,
    turns: Any,
    spans: SpanWriter,
    node_id: str,
    metrics_port: int | None,
) -> None:
    from rollout_node.weights.service import WeightSyncServicer

    runtime = lifetime.runtime
    loop = NodeLoop(settings, engine, turns, Outbox(settings.kept_ends), spans)
    gateways = RunGateways(settings.gateway, runtime, node_id)
    servicer = RolloutNodeServicer(settings, loop, gateways.of_run, node_id=node_id, incarnation=uuid.uuid4().hex)
    server = NodeServer(runtime, settings.host, settings.port, what="rollout node")
    rollout_pb2_grpc.add_RolloutNodeServiceServicer_to_server(servicer, server.server)
    weights = WeightSyncServicer(engine, node=node_id, spans=spans)
    weights_pb2_grpc.add_WeightSyncServiceServicer_to_server(weights, server.server)
    server.register(SERVICE)
    server.register(WEIGHT_SERVICE)
    handed_over = False

    def tell_health(serving: bool, why_not: str) -> None:
        server.set_serving(SERVICE, serving)
        lifetime.health.serving(None if serving else why_not)

    running = asyncio.create_task(loop.run(), name="node loop")
    try:
        port = await server.start()
        engine.on_serving.append(tell_health)
        await server.set_serving(SERVICE, engine.serving)
        lifetime.health.serving(None if engine.serving else "its weights are not proven yet")
        lifetime.ready(
            port=port, metrics_port=metrics_port, node_id=node_id, model=settings.model, serving=engine.serving
        )
        stopping = asyncio.create_task(lifetime.stopping.wait(), name="stopping")
        dead = asyncio.create_task(engine.ended(), name="engine ended")
        try:
            await asyncio.wait((stopping, running, dead), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            dead.cancel()
        if running.done():
            await running  # it ends by an error alone
        grace = min(settings.handover_s, runtime.shutdown_grace_s * _CLOSE_SHARE)
        log.info("leaving: turns may end, the rest is handed over", seconds=grace, open=len(loop.books))
        handed_over = await servicer.leave(grace)
        if dead.done() and not dead.cancelled():
            # A node without its engine can only hand over and go: let whoever runs it start it anew.
            raise NodeError(dead.result(), EXIT_FAILED)
    finally:
        if tell_health in engine.on_serving:
            engine.on_serving.remove(tell_health)
        # The client before the loop: a task of the loop that is cancelled would cancel its call at the tool.
        await gateways.close(keep_calls=handed_over)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(1.0)
        await weights.close()


def _load_turns(settings: RolloutSettings) -> Any:
    from rollout_node.turn import load_turn_format

    return load_turn_format(settings.model, renderer=settings.renderer, parser=settings.parser)


@contextlib.asynccontextmanager
async def _engine(lifetime: Lifetime, settings: RolloutSettings) -> AsyncIterator[Any]:
    """Started, and closed whatever happens. A signal meanwhile waits for the start: half an engine cannot be closed."""
    from rollout_node.engine import Engine

    engine = await Engine.start(settings.engine_settings)
    try:
        if lifetime.stopping.is_set():
            raise _Stopped
        yield engine
    finally:
        await engine.close()


class _Stopped(Exception):
    """The process was asked to stop before it served."""


async def _unless_stopped(lifetime: Lifetime, work: Any) -> Any:
    """The result of `work`, or _Stopped as soon as the process is asked to stop."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.create_task(lifetime.stopping.wait(), name="stopping")
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise _Stopped
        return task.result()
    finally:
        stopping.cancel()
        task.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    loaded = load_for_process("rollout_node", {"runtime": RuntimeSettings, "rollout": RolloutSettings}, argv)
    runtime = cast(RuntimeSettings, loaded["runtime"])
    settings = cast(RolloutSettings, loaded["rollout"])
    return process.run(functools.partial(serve, settings=settings), runtime, process="rollout_node")
