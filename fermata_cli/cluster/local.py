"""The local cluster: starts its processes in order, watches them, and stops them the other way round.

Invariants: whatever ends the `async with` block, no process of the cluster is left; a process that dies is noticed at
once, and the run ends with its words unless another of its group stands in for it or it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from fermata_cli import proc
from fermata_cli.cluster import cores, plan, prometheus_files
from fermata_cli.cluster.child import Child
from fermata_cli.cluster.plan import ProcessSpec, Role
from fermata_cli.cluster.settings import ClusterSettings
from fermata_cli.report.files import write_json
from fermata_cli.text import printable
from node_runtime import addresses
from node_runtime.errors import EXIT_OK, EXIT_USAGE, NodeError
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.client import ToolGateway

T = TypeVar("T")

_STOP_ORDER = (Role.TRAINER, Role.ROLLOUT, Role.GATEWAY, Role.BACKEND)


class LocalCluster:
    """`async with LocalCluster(...) as cluster`, then `start()` and `run()`; in the main thread."""

    def __init__(
        self,
        settings: ClusterSettings,
        runtime: RuntimeSettings,
        config: Path,
        run_dir: Path,
        *,
        tools: Mapping[str, str],
        bound: str | None,
        say: Callable[[str], None],
        by_role: Mapping[Role, Sequence[str]] | None = None,
        hosts: Mapping[Role, str] | None = None,
    ) -> None:
        """`tools`: those the tasks name, each with the place of a task that does; they must be served before an
        engine starts. `bound`: as in `plan.rollout_nodes`. `say` gets sentences. `by_role`: settings that differ
        between roles. `hosts`: what a role listens on where that is not 127.0.0.1."""
        self._settings = settings
        self._runtime = runtime
        self._config = config
        self._run_dir = run_dir
        self._tools = dict(sorted(tools.items()))
        self._bound = bound
        self._say = say
        self._by_role = dict(by_role or {})
        self._hosts = dict(hosts or {})
        self._children: dict[str, Child] = {}  # by name, in the order started
        self._restarts: dict[str, int] = {}
        self._ports: dict[str, list[str]] = {}  # of those started again, as settings
        # What the processes set for themselves is all in the file: a variable must not come in between.
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("FERMATA_")}
        self._cores = cores.available_cores()
        self.stopping = False
        self.waiting_for = ""  # what a start is waiting for at present, in words

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(self._children.values())

    def of_role(self, role: Role) -> list[Child]:
        return [child for child in self._children.values() if child.spec.role is role]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # -- start ------------------------------------------------------------------------------------------------------

    async def start(self, *, trainer: bool = True) -> None:
        """Backends, gateway, rollout nodes, trainer. Raises NodeError where one does not come up.

        Without a trainer the rollout nodes are the caller's: `trainer_node.client`.
        """
        settings = self._settings
        if self._runtime.metrics_port is not None:
            prometheus_files.write_config(self._run_dir, self._runtime)
        backends = await self._start_all(plan.backends(settings))
        self._check_tools({tool for child in backends for tool in child.ready.get("tools", ())})
        served = [(child.spec.group, child.address) for child in backends]
        (gateway,) = await self._start_all([plan.gateway(settings, served)])
        self.waiting_for = "waiting for the gateway to serve what the backends have"
        await self._unless_death(self._tools_are_served(gateway.address))
        self._say(
            "starting the engine" + "s" * (settings.rollout_nodes > 1) + ", which takes about a minute on two cores"
        )
        nodes = await self._start_all(plan.rollout_nodes(settings, gateway.address, self._cores, self._bound))
        if trainer:
            await self._start_all([plan.trainer(settings, [child.address for child in nodes])])

    async def _start_all(self, specs: Sequence[ProcessSpec]) -> list[Child]:
        """Side by side; returns when all are ready."""
        children = [await self._spawn(spec) for spec in specs]
        for child in children:
            self.waiting_for = f"waiting for the {child.what}, at most {child.spec.start_timeout_s:g} s"
            await self._unless_death(child.wait_ready(child.spec.start_timeout_s))
            self.waiting_for = ""
            port = f" on port {child.ready['port']}" if "port" in child.ready else ""
            self._say(f"{child.what} is up{port} (process {child.pid})")
        self._write_addresses()
        return children

    async def _spawn(self, spec: ProcessSpec, extra: Sequence[str] = ()) -> Child:
        command = spec.command(self._config, os.getpid(), [*self._by_role.get(spec.role, ()), *extra])
        log = self._run_dir / "logs" / f"{spec.name}.log"
        child = await Child.start(spec, command, log, self._env, self._hosts.get(spec.role, "127.0.0.1"))
        self._children[spec.name] = child
        if self._settings.bind_cores and spec.role is Role.TRAINER:
            self._keep_off_engines(child)
        return child

    def _keep_off_engines(self, child: Child) -> None:
        if len(self._cores) > 1:
            try:
                os.sched_setaffinity(child.pid, cores.trainer_cores(self._cores, self._settings.rollout_nodes))
            except (OSError, AttributeError):
                return  # it ended already, or the system forbids it: slower, not wrong

    def _check_tools(self, served: Set[str]) -> None:
        """Each backend says at its start what it serves, so nothing else needs to be up for this."""
        missing = [tool for tool in self._tools if tool not in served]
        if missing:
            named = ", ".join(f"{quoted([tool])} ({printable(self._tools[tool], 300)})" for tool in missing)
            raise NodeError(
                f"the tasks name {named}, which no backend serves; served are {quoted(sorted(served)) or 'none'}: "
                "correct the tasks, or add a backend to cluster.backends",
                EXIT_USAGE,
            )

    async def _tools_are_served(self, address: str) -> None:
        name = "fermata-cluster"
        async with ToolGateway([address], runtime=self._runtime, run_id=name, node_id=name) as client:
            await client.wait_connected(self._settings.start.tools_s)
            await client.wait_for_tools(self._tools, self._settings.start.tools_s)
            self._say(f"the gateway serves {', '.join(sorted(client.catalogue))}")

    async def _unless_death(self, work: Awaitable[T]) -> T:
        """The result of `work`, or the death of a process that is needed, whichever comes first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, *(child.ended for child in self.children)), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise next(child for child in self.children if child.ended.done()).death()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _write_addresses(self) -> None:
        """cluster.json: where to send curl, grpcurl and `fermata tools`; targets.json: the same for Prometheus."""
        rows = [
            {
                "name": child.spec.name,
                "role": child.spec.role.value,
                "pid": child.pid,
                "address": child.address if "port" in child.ready else None,
                "metrics": self.metrics_url(child),
                "log": str(child.log),
            }
            for child in self.children
        ]
        write_json(self._run_dir / "cluster.json", {"processes": rows})
        self._write_targets()

    def _write_targets(self) -> None:
        """What Prometheus is to scrape: whoever is up, at this moment."""
        if self._runtime.metrics_port is not None:
            up = [child for child in self.children if not child.ended.done()]
            prometheus_files.write_targets(
                self._run_dir,
                [(child.spec.role, child.spec.name, at) for child in up if (at := self._metrics_address(child))],
            )

    def metrics_url(self, child: Child) -> str | None:
        """None while it has no metrics to show."""
        scheme = "https" if self._runtime.metrics_tls else "http"
        address = self._metrics_address(child)
        return f"{scheme}://{address}/metrics" if address else None

    def _metrics_address(self, child: Child) -> str | None:
        port = child.metrics_port
        return addresses.join(addresses.reached_at(self._runtime.metrics_host), port) if port else None

    # -- watch ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the trainer ends well. Raises NodeError where it does not, or where a group has nobody left."""
        while True:
            await asyncio.wait({child.ended for child in self.children}, return_when=asyncio.FIRST_COMPLETED)
            for child in [child for child in self.children if child.ended.done()]:
                if child.spec.role is Role.TRAINER and child.ended.result() == EXIT_OK:
                    return
                await self._after_death(child)

    async def _after_death(self, child: Child) -> None:
        """Start it again, go on without it, or raise."""
        death = child.death()
        spec = child.spec
        if proc.group_alive(child.pid):
            child.kill()  # an engine whose node is gone
        self._write_targets()
        used = self._restarts.get(spec.name, 0)
        if used < spec.restarts:
            self._restarts[spec.name] = used + 1
            self._say(f"{death}: starting it again ({used + 1} of {spec.restarts})")
            again = await self._spawn(spec, self._same_ports(child))
            try:
                await again.wait_ready(spec.start_timeout_s)
            except NodeError:
                if again.ended.done():
                    return  # it died again: the next look at it counts one restart more
                raise
            self._write_addresses()
            self._say(f"{again.what} is up again on port {again.ready['port']} (process {again.pid})")
            return
        del self._children[spec.name]
        if any(other.spec.group == spec.group for other in self.children):
            self._say(f"{death}: going on without it")
            self._write_addresses()
            return
        raise death

    def _same_ports(self, child: Child) -> list[str]:
        """Its clients look for it where it was, also after a restart that never got as far."""
        if child.ready:
            same = [f"gateway.port={child.ready['port']}"]
            if child.metrics_port:
                same.append(f"runtime.metrics_port={child.metrics_port}")
            self._ports[child.spec.name] = same
        return self._ports[child.spec.name]

    async def hold(self) -> None:
        """After `run`: watch what is left, for ever."""
        for child in self.of_role(Role.TRAINER):
            del self._children[child.spec.name]
        self._write_addresses()
        await self.run()

    @property
    def restarts(self) -> int:
        """How often a process was started again."""
        return sum(self._restarts.values())

    # -- stop -------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Everything, in order; may be called again."""
        self.stopping = True
        for role in _STOP_ORDER:
            children = self.of_role(role)
            orderly = await asyncio.gather(*(child.stop(self._settings.stop_grace_s) for child in children))
            for child, fine in zip(children, orderly, strict=True):
                if not fine:
                    self._say(f"the {child.what} did not stop within {self._settings.stop_grace_s:g} s and was killed")
            if children:
                with contextlib.suppress(OSError):  # a full disk must not keep the others running
                    self._write_targets()

    def kill(self) -> None:
        """Everything, now."""
        self.stopping = True
        for child in self.children:
            child.kill()


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{printable(name, 60)}'" for name in names)
