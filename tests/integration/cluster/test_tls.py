"""Mutual TLS and tokens between real processes: who belongs to a cluster is served, all others hear one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fermata_cli import demo
from fermata_cli.cluster.certificates import Authority, write_secret
from fermata_cli.cluster.identity import ClusterIdentity
from fermata_cli.cluster.plan import Role
from node_runtime.errors import EXIT_USAGE, NodeError
from node_runtime.runtime_settings import RuntimeSettings
from tests.integration.cluster.processes import REPOSITORY, run, services, sets
from tests.integration.tool_gateway.gateway_world import Proxy, until
from tool_gateway.client import ToolGateway

pytestmark = [pytest.mark.integration, pytest.mark.timeout(150)]
CALL = ("tools", "call", "calculator", '{"expression": "12*34"}')
LIST = ("tools", "list")


@dataclasses.dataclass(frozen=True)
class World:
    folder: Path
    identity: ClusterIdentity
    config: Path  # of people: their certificate and the token
    gateway: str
    gateway_log: Path
    backend: str


def tree(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return nested


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tls") / "größer als #1: 'x'"  # people put their runs anywhere
    folder.mkdir()
    identity = ClusterIdentity(folder / "tls")
    identity.write()
    config = folder / "fermata.yaml"
    config.write_text(yaml.safe_dump(tree(identity.settings)))
    log, read = folder / "gateway.log", ("--config", str(config))
    with services() as start, log.open("wb") as errors:
        flags = sets("backend.port=0", *identity.overrides[Role.BACKEND])
        backend = start("tool_backend", "calculator", *read, *flags, log=errors)
        served = f"127.0.0.1:{backend['port']}"
        pools = json.dumps([{"name": "all", "addresses": [served]}])
        flags = sets("gateway.port=0", f"gateway.pools={pools}", *identity.overrides[Role.GATEWAY])
        ready = start("tool_gateway", *read, *flags, log=errors)
        yield World(folder, identity, config, f"127.0.0.1:{ready['port']}", log, served)


def ask(world: World, *settings: str, command: tuple[str, ...] = CALL, config: bool = True) -> tuple[int, str, str]:
    file = ("--config", str(world.config)) if config else ()
    return run(*command, "--gateway", world.gateway, *file, *sets(*settings), folder=world.folder)


def test_who_belongs_to_the_cluster_is_served(world: World) -> None:
    code, out, err = ask(world)
    assert (code, out) == (0, "408\n"), err
    assert ask(world, command=LIST)[0] == 0


def test_keys_and_token_are_their_owners_alone(world: World) -> None:
    folder = world.folder / "tls"
    assert folder.stat().st_mode & 0o777 == 0o700
    secrets = [*folder.glob("*.key"), folder / "token"]
    assert len(secrets) == 6
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}


def setting(key: str, path: object) -> str:
    return f"runtime.{key}={json.dumps(str(path))}"


def strangers(world: World) -> dict[str, tuple[bool, tuple[str, ...], str]]:
    """Whether it reads the people's file, what it sets otherwise, what it is told."""
    ca, token = world.identity.settings["runtime.tls.ca_file"], world.identity.settings["runtime.tokens.send_file"]
    other = world.folder / "other"
    if not other.exists():
        other.mkdir()
        write_secret(other / "token", b"a-token-of-somebody-else\n")
        Authority(other).issue("client")
    theirs = (setting("tls.cert_file", other / "ca-client.pem"), setting("tls.key_file", other / "ca-client.key"))
    return {
        "in clear": (False, (), "speaks TLS and this process does not: name its authority in runtime.tls.ca_file"),
        "no certificate": (
            False, (setting("tls.ca_file", ca), setting("tokens.send_file", token)),
            "asks for a client certificate: name runtime.tls.cert_file and key_file",
        ),
        "another authority's certificate": (True, theirs, "does not accept the certificate in runtime.tls.cert_file"),
        "trust in another authority": (True, (setting("tls.ca_file", other / "ca.pem"),), "is not trusted by runtime."),
        "no token": (True, ("runtime.tokens.send_file=null",), "no token was sent: send 'authorization: Bearer TOKEN'"),
        "a wrong token": (True, (setting("tokens.send_file", other / "token"),), "the token sent is not accepted here"),
    }  # fmt: skip


@pytest.mark.parametrize("command", [CALL, LIST], ids=["call", "list"])
@pytest.mark.parametrize(
    "who",
    ["in clear", "no certificate", "another authority's certificate", "trust in another authority", "no token",
     "a wrong token"],
)  # fmt: skip
def test_a_stranger_hears_one_sentence(world: World, who: str, command: tuple[str, ...]) -> None:
    config, settings, words = strangers(world)[who]
    code, out, err = ask(world, *settings, command=command, config=config)
    assert (code, out) == (3, ""), err
    (line,) = [line for line in err.splitlines() if not line.startswith("fermata: waiting for")]
    assert line.startswith("fermata: "), err
    assert line.count(world.gateway) == 1
    assert words in line


def test_strangers_do_not_fill_the_log(world: World) -> None:
    before = world.gateway_log.read_text().splitlines()
    for _ in range(3):
        assert ask(world, "runtime.tokens.send_file=null", command=LIST)[0] == 3
    news = world.gateway_log.read_text().splitlines()[len(before) :]
    assert len(news) <= 1, news
    assert ask(world)[1] == "408\n"


@pytest.mark.parametrize(
    "knock", ["in clear", "no certificate", "another name", "no h2", "half a handshake", "nothing"]
)
def test_strangers_before_the_first_call_leave_no_trace_in_the_log(world: World, knock: str) -> None:
    context = ssl.create_default_context(cafile=world.identity.settings["runtime.tls.ca_file"])
    context.check_hostname = False
    if knock == "no h2":
        shown = world.identity.settings
        context.load_cert_chain(shown["runtime.tls.cert_file"], shown["runtime.tls.key_file"])
    else:
        context.set_alpn_protocols(["h2"])
    host, _, port = world.gateway.partition(":")
    before = world.gateway_log.read_text()
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=20) as stranger, contextlib.suppress(OSError):
            if knock == "in clear":
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n")
                stranger.recv(1)
            elif knock == "half a handshake":
                stranger.sendall(bytes.fromhex("1603010200010001fc"))
            elif knock != "nothing":
                name = "elsewhere.example" if knock == "another name" else host
                with context.wrap_socket(stranger, server_hostname=name) as encrypted:
                    encrypted.sendall(b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n")
                    while encrypted.recv(1 << 16):
                        pass
    assert ask(world)[1] == "408\n"
    news = world.gateway_log.read_text().removeprefix(before).splitlines()
    assert [line for line in news if "stream attached" not in line and "stream ended" not in line] == []


def copy_identity(world: World, files: dict[str, Path]) -> dict[Path, bytes]:
    held = {}
    for key, file in files.items():
        name = "runtime.tokens.send_file" if key == "token" else f"runtime.tls.{key}"
        held[file] = Path(str(world.identity.settings[name])).read_bytes()
        file.write_bytes(held[file])
    return held


async def test_files_that_are_gone_for_a_while_cost_no_call(world: World, tmp_path: Path) -> None:
    """A renewal by hand: whoever connects again in the middle of it says so, and tries again."""
    files = {key: tmp_path / key for key in ("ca_file", "cert_file", "key_file", "token")}
    held = copy_identity(world, files)
    token = files.pop("token")
    runtime = RuntimeSettings.model_validate({"tls": files, "tokens": {"send_file": token}})
    proxy = Proxy(world.gateway)
    await proxy.start()
    try:
        async with ToolGateway([proxy.address], runtime=runtime, run_id="renewal", node_id="n") as client:
            await client.wait_connected(20)
            for number, file in enumerate((*files.values(), token)):
                file.write_bytes(b"")
                proxy.cut()
                await until(lambda file=file: str(file) in client.why_disconnected)
                with pytest.raises(NodeError, match=str(file)) as caught:
                    await client.wait_connected(20)
                assert caught.value.exit_code == EXIT_USAGE
                result = asyncio.create_task(
                    client.call(
                        key=f"renewal/t/0/0/{number}", tool="calculator",
                        args_json=b'{"expression": "12*34"}', deadline_s=60,
                    )
                )  # fmt: skip
                file.write_bytes(held[file])
                assert (await result).text == b"408", result.result()
    finally:
        await proxy.close()


def test_a_rollout_node_that_its_gateway_refuses_says_so_and_ends(world: World) -> None:
    _, settings, words = strangers(world)["a wrong token"]
    flags = sets("rollout.gateway=" + json.dumps([world.gateway]), f"rollout.model={demo.MODEL_DIR}", *settings)
    process = subprocess.run(
        [sys.executable, "-m", "rollout_node", "--config", str(world.config), *flags],
        capture_output=True, text=True, timeout=120, check=False, cwd=REPOSITORY,
    )  # fmt: skip
    assert process.returncode == 3, process.stderr
    (said,) = [line for line in process.stderr.splitlines() if line.startswith("rollout_node: ")]
    assert world.gateway in said
    assert words in said


def test_a_gateway_that_its_backend_refuses_says_so_once(world: World) -> None:
    _, settings, words = strangers(world)["another authority's certificate"]
    log = world.folder / "refused.log"
    pools = json.dumps([{"name": "all", "addresses": [world.backend]}])
    with services() as start, log.open("wb") as errors:
        flags = sets("gateway.port=0", f"gateway.pools={pools}", *settings)
        ready = start("tool_gateway", "--config", str(world.config), *flags, log=errors)
        asked = dataclasses.replace(world, gateway=f"127.0.0.1:{ready['port']}")
        # It shows the stranger's certificate to clients too, who do not trust it.
        code, _, err = ask(asked, command=LIST)
        assert (code, "is not trusted by" in err) == (3, True), err
    told = [line for line in log.read_text().splitlines() if words in line]
    assert len(told) == 1
    assert world.backend in told[0]
