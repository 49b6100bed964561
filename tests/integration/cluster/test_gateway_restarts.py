"""A gateway that is killed under TLS and cannot start for a while: the same ports again, or the reason, said once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from fermata_cli.cluster import plan
from fermata_cli.cluster.child import Child
from fermata_cli.cluster.identity import ClusterIdentity
from fermata_cli.cluster.local import LocalCluster
from fermata_cli.cluster.settings import ClusterSettings
from node_runtime.errors import EXIT_USAGE, NodeError
from node_runtime.runtime_settings import RuntimeSettings
from tests.integration.cluster.processes import cluster_of, scraped
from tests.integration.cluster.test_tls import tree
from tests.integration.tool_gateway.gateway_world import until
from tool_gateway.client import ToolGateway

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
SETTINGS = ClusterSettings.model_validate({"backends": [{"name": "calculator", "tools": ["calculator"]}]})


@asynccontextmanager
async def watched(run_dir: Path, told: list[str]) -> AsyncIterator[tuple[LocalCluster, Child, asyncio.Task[None]]]:
    """The part of a cluster that needs no engine, and its gateway; the task watches it."""
    identity = ClusterIdentity(run_dir / "tls")
    identity.write()
    settings = tree({**identity.settings, "runtime.metrics_port": 0, "gateway.port": 0})
    config = run_dir / "fermata.yaml"
    config.write_text(yaml.safe_dump(settings))
    runtime = RuntimeSettings.model_validate(settings["runtime"])
    async with LocalCluster(
        SETTINGS, runtime, config, run_dir, tools={}, bound=None, say=told.append, by_role=identity.overrides
    ) as cluster:
        backends = await cluster._start_all(plan.backends(SETTINGS))
        served = [(child.spec.group, child.address) for child in backends]
        (gateway,) = await cluster._start_all([plan.gateway(SETTINGS, served)])
        watching = asyncio.create_task(cluster.run())
        try:
            async with ToolGateway([gateway.address], runtime=runtime, run_id="run", node_id="node") as client:
                await client.wait_for_tools(["calculator"], 20)
                os.kill(gateway.pid, signal.SIGKILL)
                yield cluster, gateway, watching
                if not watching.done():
                    call = client.call(
                        key="run/t/0/0/0", tool="calculator", args_json=b'{"expression": "12*34"}', deadline_s=40
                    )
                    assert (await call).text == b"408"
        finally:
            watching.cancel()
            await asyncio.wait((watching,))


async def test_it_comes_back_where_it_was_once_it_can(tmp_path: Path) -> None:
    told: list[str] = []
    key, aside = tmp_path / "tls" / "ca-gateway.key", tmp_path / "aside"
    async with watched(tmp_path, told) as (_cluster, gateway, _watching):
        before = cluster_of(tmp_path)["gateway"]
        key.rename(aside)
        await until(lambda: any("(2 of 3)" in sentence for sentence in told))
        assert scraped(tmp_path) == {"backend-calculator"}
        aside.rename(key)
        await until(lambda: any("gateway is up again" in sentence for sentence in told))
        again = cluster_of(tmp_path)["gateway"]
        assert (again["address"], again["metrics"]) == (before["address"], before["metrics"])
        assert again["pid"] != gateway.pid
        assert scraped(tmp_path) == {"backend-calculator", "gateway"}


async def test_where_it_never_can_the_run_ends_with_its_words_once(tmp_path: Path) -> None:
    told: list[str] = []
    key = tmp_path / "tls" / "ca-gateway.key"
    async with watched(tmp_path, told) as (_cluster, _gateway, watching):
        key.unlink()
        with pytest.raises(NodeError) as caught:
            await watching
    assert caught.value.exit_code == EXIT_USAGE
    assert str(caught.value).count(f"runtime.tls.key_file: {key} does not exist: name an existing file") == 1
    assert json.loads((tmp_path / "targets.json").read_text()) == []
