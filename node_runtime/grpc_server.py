"""The one gRPC server of a process: TLS, tokens, health, reflection and a bounded stop.

Invariant: a port belongs to one process (no SO_REUSEPORT); a service is SERVING only between start() and stop();
without an accepted token nothing but a health check answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from node_runtime import addresses
from node_runtime.credentials import TokenCheck, read_tokens, server_credentials
from node_runtime.errors import EXIT_UNAVAILABLE, NodeError
from node_runtime.grpc_options import SERVER_OPTIONS
from node_runtime.logs import get_logger
from node_runtime.runtime_settings import RuntimeSettings

_TELL_EVERY_S: Final = 30.0
_OPEN: Final = "/grpc.health.v1.Health/Check"  # and not Watch, which holds memory for as long as it is open

log = get_logger("node_runtime.grpc_server")


class _TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without an accepted token before their handler, and their messages, are touched."""

    def __init__(self, check: TokenCheck) -> None:
        self._check = check
        self._refused = 0
        self._tell_after = 0.0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method == _OPEN:
            return await continuation(handler_call_details)
        shown = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        refusal = self._check.refusal(shown)
        if refusal is None:
            return await continuation(handler_call_details)
        self._tell(handler_call_details.method)

        async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

        # On the wire a refusal is trailers only, whatever the method's shape; this one waits for no request.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _tell(self, method: str) -> None:
        """Now and then: somebody who tries again and again must not fill the log."""
        self._refused += 1
        now = time.monotonic()
        if now >= self._tell_after:
            self._tell_after = now + _TELL_EVERY_S
            log.warning("a call without an accepted token was refused", method=method, refused_so_far=self._refused)


class NodeServer:
    """Build it inside the running loop, add servicers to `.server`, register their names, then start()."""

    def __init__(
        self, runtime: RuntimeSettings, host: str = "127.0.0.1", port: int = 0, *, what: str = "server"
    ) -> None:
        """`what` names the process in sentences ("gateway"). Raises NodeError where TLS or token files are unusable."""
        self._host = host
        self._port = port
        self._what = what
        self._credentials = server_credentials(runtime.tls)
        self._services: list[str] = []
        self._started = False
        self._changes: set[asyncio.Task[None]] = set()
        interceptors: list[grpc.aio.ServerInterceptor] = []
        accept = runtime.tokens.accept_file
        if accept is not None:
            interceptors.append(_TokenInterceptor(TokenCheck(read_tokens(accept, "runtime.tokens.accept_file"))))
        if not addresses.is_loopback(host) and (self._credentials is None or accept is None):
            missing = [
                name
                for name, absent in (
                    ("TLS (runtime.tls)", self._credentials is None),
                    ("tokens (runtime.tokens)", accept is None),
                )
                if absent
            ]
            log.warning(
                f"the {what} listens on {host}, which other machines may reach, without {' and without '.join(missing)}"
            )
        self.server: grpc.aio.Server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    def register(self, service_full_name: str) -> None:
        """Names a service ("fermata.v1.ToolGatewayService") for health and reflection; before start()."""
        if self._started:
            raise RuntimeError(f"{service_full_name} registered after start(): register before")
        self._services.append(service_full_name)

    async def start(self) -> int:
        """Binds and serves; returns the port. Raises NodeError (EXIT_UNAVAILABLE) naming host and port."""
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        addresses.check_free(self._host, self._port, self._what, "port")
        address = addresses.join(self._host, self._port)
        try:
            if self._credentials is None:
                port = self.server.add_insecure_port(address)
            else:
                port = self.server.add_secure_port(address, self._credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise NodeError(
                f"{self._what}: cannot listen on port {self._port} of {self._host}: it was taken in this moment, or "
                "gRPC cannot use the TLS files",
                EXIT_UNAVAILABLE,
            )
        await self.server.start()
        self._started = True
        for name in (*self._services, ""):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return port

    def set_serving(self, service: str, serving: bool) -> asyncio.Task[None]:
        """What health answers for `service` ("" is the whole process); watchers are told.

        Takes effect without being awaited; await the result to know that it has.
        """
        status = health_pb2.HealthCheckResponse
        change = self._health.set(service, status.SERVING if serving else status.NOT_SERVING)
        task = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return task

    def _changed(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("health could not be changed", exc_info=error)

    async def stop(self, grace_s: float) -> None:
        """Health says NOT_SERVING, no new calls are taken, running ones get `grace_s` seconds, then all is closed."""
        if self._changes:
            await asyncio.wait(set(self._changes))
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
