"""Server and channel over real sockets: TLS, mutual TLS, tokens, health, reflection, ports, stop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from fermata.v1 import gateway_pb2, gateway_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fermata_cli.cluster.certificates import Authority
from node_runtime import addresses
from node_runtime.credentials import TokenCheck, auth_metadata
from node_runtime.errors import EXIT_UNAVAILABLE, EXIT_USAGE, NodeError
from node_runtime.grpc_channel import open_channel, told_error, wait_ready
from node_runtime.grpc_server import NodeServer
from node_runtime.handshake import refusal
from node_runtime.runtime_settings import RuntimeSettings

SERVICE = "fermata.v1.ToolGatewayService"
PLAIN = RuntimeSettings()


class Gateway(gateway_pb2_grpc.ToolGatewayServiceServicer):
    """One unary method and one stream, which echo."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.metadata: dict[str, str | bytes] = {}

    async def GetCall(self, request: gateway_pb2.GetCallRequest, context: Any) -> gateway_pb2.GetCallResponse:
        self.metadata = dict(context.invocation_metadata())
        self.entered.set()
        await self.go_on.wait()
        return gateway_pb2.GetCallResponse(tool=request.key)

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[gateway_pb2.ServerFrame]:
        async for request in requests:
            pong = gateway_pb2.ServerFrame.Pong(nonce=request.events[0].ping.nonce)
            yield gateway_pb2.ServerFrame(events=[gateway_pb2.ServerFrame.Event(pong=pong)])


@asynccontextmanager
async def serving(
    runtime: RuntimeSettings, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[tuple[NodeServer, Gateway, str]]:
    server = NodeServer(runtime, host, port, what="gateway")
    servicer = Gateway()
    gateway_pb2_grpc.add_ToolGatewayServiceServicer_to_server(servicer, server.server)
    server.register(SERVICE)
    bound = await server.start()
    try:
        yield server, servicer, addresses.join(host, bound)
    finally:
        servicer.go_on.set()
        await server.stop(0.1)


async def ask(address: str, runtime: RuntimeSettings) -> str:
    """Unary and stream, each with its answer."""
    async with open_channel(address, runtime) as channel:
        stub = gateway_pb2_grpc.ToolGatewayServiceStub(channel)
        answer = await stub.GetCall(gateway_pb2.GetCallRequest(key="k"), timeout=10)
        stream = stub.Attach(timeout=10)
        ping = gateway_pb2.ClientFrame.Ping(nonce=7)
        await stream.write(gateway_pb2.ClientFrame(events=[gateway_pb2.ClientFrame.Event(ping=ping)]))
        frame = await stream.read()
        assert frame.events[0].pong.nonce == 7
        await stream.done_writing()
        assert await stream.read() == grpc.aio.EOF
        return str(answer.tool)


async def refused(address: str, runtime: RuntimeSettings) -> list[tuple[grpc.StatusCode, str]]:
    """Unary and stream, each with its refusal; the stream waits for the server before it says anything."""
    found = []
    async with open_channel(address, runtime) as channel:
        stub = gateway_pb2_grpc.ToolGatewayServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GetCall(gateway_pb2.GetCallRequest(key="k"), timeout=10)
        found.append((unary.value.code(), unary.value.details() or ""))
        stream = stub.Attach(timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await stream.read()
        found.append((streamed.value.code(), streamed.value.details() or ""))
    return found


@pytest.fixture
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def settings(tls: dict[str, Any] | None = None, tokens: dict[str, Any] | None = None) -> RuntimeSettings:
    return RuntimeSettings.model_validate({"tls": tls or {}, "tokens": tokens or {}})


async def test_plain_calls() -> None:
    async with serving(PLAIN) as (_, servicer, address):
        assert await ask(address, PLAIN) == "k"
        assert "authorization" not in servicer.metadata


async def test_tls(authority: Authority, tmp_path: Path) -> None:
    server = authority.issue("server")
    with_tls = settings({"cert_file": server.cert, "key_file": server.key, "ca_file": authority.ca_file})
    client = settings({"ca_file": authority.ca_file})
    async with serving(with_tls) as (_, _servicer, address):
        assert await ask(address, client) == "k"
        # In clear, and under another authority, nothing is answered.
        for wrong in (PLAIN, settings({"ca_file": Authority(tmp_path, "other").ca_file})):
            async with open_channel(address, wrong) as channel:
                with pytest.raises(NodeError) as caught:
                    await wait_ready(channel, address, wrong, timeout_s=30, what="gateway")
                assert caught.value.exit_code == EXIT_UNAVAILABLE


async def test_what_keeps_a_client_out_is_told_at_once(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "other")
    server, client, foreign = authority.issue("server"), authority.issue("client"), stranger.issue("client")
    ca = {"ca_file": authority.ca_file}
    mutual = {**ca, "cert_file": server.cert, "key_file": server.key, "require_client_cert": True}
    right = {**ca, "cert_file": client.cert, "key_file": client.key}
    elsewhere = authority.issue("elsewhere", hosts=("gateway.fermata",), ips=("10.1.2.3",))
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (mutual, ca, "asks for a client certificate: name runtime.tls.cert_file and key_file"),
        (mutual, {**ca, "cert_file": foreign.cert, "key_file": foreign.key}, "does not accept the certificate in"),
        (mutual, {}, "speaks TLS and this process does not: name its authority in runtime.tls.ca_file"),
        (mutual, {**right, "ca_file": stranger.ca_file}, "is not trusted by runtime.tls.ca_file"),
        ({**mutual, "require_client_cert": False}, {}, "speaks TLS and this process does not"),
        ({"cert_file": elsewhere.cert, "key_file": elsewhere.key}, ca, "is not for 127.0.0.1: connect to a name"),
        ({}, ca, "speaks no TLS and this process does"),
    ]
    for there, here, words in cases:
        asking = settings(here)
        async with (
            serving(settings(there)) as (_, _servicer, address),
            open_channel(address, asking) as channel,
        ):
            with pytest.raises(NodeError) as caught:
                await wait_ready(channel, address, asking, timeout_s=30, what="the gateway")
            told = str(caught.value)
            assert (told.startswith("the gateway: "), address in told, words in told) == (True, True, True), told
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await gateway_pb2_grpc.ToolGatewayServiceStub(channel).GetCall(gateway_pb2.GetCallRequest(), timeout=10)
            assert await told_error(failed.value, address, asking) == (told.removeprefix("the gateway: "), True)
    async with serving(settings(mutual)) as (_, _servicer, address):
        assert await ask(address, settings(right)) == "k"


async def test_a_peer_that_is_down_or_another_program_is_not_judged() -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = addresses.join("127.0.0.1", server.sockets[0].getsockname()[1])
    async with server:
        assert await refusal(address, PLAIN) is None
    await server.wait_closed()
    assert await refusal(address, PLAIN) is None


async def test_a_certificate_for_another_name_needs_server_name(authority: Authority) -> None:
    server = authority.issue("elsewhere", hosts=("gateway.fermata",), ips=("10.1.2.3",))
    async with serving(settings({"cert_file": server.cert, "key_file": server.key})) as (_, _servicer, address):
        client = {"ca_file": authority.ca_file}
        assert await ask(address, settings({**client, "server_name": "gateway.fermata"})) == "k"
        async with open_channel(address, settings(client)) as channel:
            with pytest.raises(NodeError):
                await wait_ready(channel, address, settings(client), timeout_s=30, what="gateway")


async def test_an_address_that_was_looked_up_is_checked_by_its_name(authority: Authority) -> None:
    server = authority.issue("calc", hosts=("calc.fermata",), ips=())
    client = {"ca_file": authority.ca_file}
    async with serving(settings({"cert_file": server.cert, "key_file": server.key})) as (_, _servicer, address):
        for name, set_to, right in (
            ("calc.fermata", {}, True),
            ("other.fermata", {}, False),
            ("other.fermata", {"server_name": "calc.fermata"}, True),
            ("calc.fermata", {"server_name": "other.fermata"}, False),
        ):
            async with open_channel(address, settings(client | set_to), server_name=name) as channel:
                try:
                    await wait_ready(
                        channel, address, settings(client | set_to), timeout_s=30, what="backend", server_name=name
                    )
                except NodeError:
                    assert not right
                else:
                    assert right


async def test_mutual_tls(authority: Authority, tmp_path: Path) -> None:
    server, client = authority.issue("server"), authority.issue("client")
    stranger = Authority(tmp_path, "strangers").issue("client")
    ca = {"ca_file": authority.ca_file}
    strict = settings({"cert_file": server.cert, "key_file": server.key, **ca, "require_client_cert": True})
    async with serving(strict) as (_, _servicer, address):
        assert await ask(address, settings({"cert_file": client.cert, "key_file": client.key, **ca})) == "k"
        for wrong in (settings(ca), settings({"cert_file": stranger.cert, "key_file": stranger.key, **ca})):
            assert {code for code, _ in await refused(address, wrong)} == {grpc.StatusCode.UNAVAILABLE}


@pytest.mark.parametrize("encrypted", [False, True])
async def test_tokens_on_unary_and_stream(authority: Authority, tmp_path: Path, encrypted: bool) -> None:
    (tmp_path / "accept").write_text("# ours\nalpha-token\n\n  beta-token \n")
    (tmp_path / "beta").write_text("beta-token\n")
    (tmp_path / "wrong").write_text("beta-tokeN\n")
    pem = authority.issue("server")
    server_tls = {"cert_file": pem.cert, "key_file": pem.key} if encrypted else {}
    client_tls = {"ca_file": authority.ca_file} if encrypted else {}
    async with serving(settings(server_tls, {"accept_file": tmp_path / "accept"})) as (_, servicer, address):
        assert await ask(address, settings(client_tls, {"send_file": tmp_path / "beta"})) == "k"
        assert servicer.metadata["authorization"] == "Bearer beta-token"
        for tokens, told in (({}, "no token was sent"), ({"send_file": tmp_path / "wrong"}, "is not accepted here")):
            runtime = settings(client_tls, tokens)
            for code, details in await refused(address, runtime):
                assert code == grpc.StatusCode.UNAUTHENTICATED
                assert told in details
                assert "tokeN" not in details
            # The check stays open: probes carry no token. A watch would hold memory, for anybody.
            async with open_channel(address, runtime) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                with pytest.raises(grpc.aio.AioRpcError) as watched:
                    await health.Watch(health_pb2.HealthCheckRequest(), timeout=10).read()
                assert watched.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_own_metadata_goes_beside_the_token(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("secret")
    runtime = settings(tokens={"accept_file": tmp_path / "t", "send_file": tmp_path / "t"})
    async with serving(runtime) as (_, servicer, address), open_channel(address, runtime) as channel:
        stub = gateway_pb2_grpc.ToolGatewayServiceStub(channel)
        await stub.GetCall(gateway_pb2.GetCallRequest(key="k"), timeout=10, metadata=(("x-mine", "1"),))
        assert (servicer.metadata["x-mine"], servicer.metadata["authorization"]) == ("1", "Bearer secret")


def test_a_token_is_checked_as_a_whole() -> None:
    check = TokenCheck(["alpha", "beta"])
    assert check.refusal("Bearer alpha") is None
    assert check.refusal(b"bearer beta") is None
    for wrong in (None, "", "alpha", "Basic alpha", "Bearer", "Bearer ", "Bearer alph", "Bearer alphabeta", b"\xff"):
        told = check.refusal(wrong)
        assert told is not None
        assert "Bearer TOKEN" in told or "not accepted" in told


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\n# none\n", "holds no token: write one a line"),
        (b"good\ntwo words\n", "token 2 in .* has blanks or control characters in it"),
        (b"form\x0cfeed\n", "token 1 in .* has blanks or control characters in it"),
        ("tökén\n".encode(), "token 1 in .* has characters outside ASCII in it"),
        ("token".encode("utf-16"), "is not UTF-8"),
        (b"a" * 4097, "token 1 in .* has more than 4096 characters"),
        (None, "does not exist: name an existing file"),
    ],
    ids=range(7),
)
async def test_unusable_token_files(tmp_path: Path, content: bytes | None, told: str) -> None:
    file = tmp_path / "tokens"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(NodeError, match=told) as caught:
        NodeServer(settings(tokens={"accept_file": file}), what="gateway")
    assert caught.value.exit_code == EXIT_USAGE
    with pytest.raises(NodeError, match=told):
        auth_metadata(settings(tokens={"send_file": file}))


@pytest.mark.parametrize(
    "content",
    [b"secret\r\nother\r\n", b"\xef\xbb\xbfsecret", "# für uns\n\n\tsecret \n".encode(), b"secret", b"a" * 4096],
    ids=["CRLF", "byte order mark", "comment", "no newline", "long"],
)
async def test_a_token_is_found_whatever_editor_wrote_the_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(content)
    runtime = settings(tokens={"accept_file": file, "send_file": file})
    async with serving(runtime) as (_, servicer, address):
        assert await ask(address, runtime) == "k"
        assert servicer.metadata["authorization"] in ("Bearer secret", "Bearer " + "a" * 4096)


@pytest.mark.parametrize("address", ["10.0.0.1:7010", "gateway.example:7010", "[2001:db8::1]:7010", "0.0.0.0:1"])
async def test_a_token_never_leaves_the_machine_in_clear(tmp_path: Path, address: str) -> None:
    (tmp_path / "t").write_text("secret")
    with pytest.raises(NodeError, match=r"would travel in clear: set runtime\.tls\.ca_file") as caught:
        open_channel(address, settings(tokens={"send_file": tmp_path / "t"}))
    assert caught.value.exit_code == EXIT_USAGE
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("address", ["localhost", "", ":1", "a:b", "a:0", "a:70000", "::1:7010", "1.2.3.4:٣"])
async def test_malformed_addresses(address: str) -> None:
    with pytest.raises(NodeError, match="write host:port") as caught:
        open_channel(address, PLAIN)
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    "host",
    ["a..b", "a" * 64, "a." * 127 + "b", ".", "a b", "münchen.example", "a\n", "[localhost]", "[::g]", "[1.2.3.4]"],
)
async def test_hosts_that_no_resolver_takes(host: str) -> None:
    with pytest.raises(NodeError, match="has no host: write a name such as") as caught:
        open_channel(f"{host}:7010", PLAIN)
    assert caught.value.exit_code == EXIT_USAGE
    assert not addresses.is_host(host)
    async with asyncio.timeout(10):
        with pytest.raises(NodeError, match="is not an address of this machine") as caught:
            await NodeServer(PLAIN, host, what="gateway").start()
    assert caught.value.exit_code == EXIT_UNAVAILABLE


@pytest.mark.parametrize(
    "host", ["a", "a.b.", "_grpc._tcp.x-y.example", "127.1", "xn--mnchen-3ya.example", "[fe80::1%2]"]
)
def test_hosts_that_may_be(host: str) -> None:
    assert addresses.split(f"{host}:1") == (host.strip("[]"), 1)


async def test_a_port_in_use_is_one_sentence() -> None:
    async with serving(PLAIN) as (_, _servicer, address):
        _, port = addresses.split(address)
        second = NodeServer(PLAIN, "127.0.0.1", port, what="gateway")
        with pytest.raises(NodeError) as caught:
            await second.start()
        assert str(caught.value).startswith(f"gateway: port {port} on 127.0.0.1 is in use: ")
        assert caught.value.exit_code == EXIT_UNAVAILABLE
        await second.stop(0)
        assert await ask(address, PLAIN) == "k"


async def test_so_reuseport_is_off_in_grpc_itself() -> None:
    """Past our own look at the port, gRPC refuses too."""
    async with serving(PLAIN) as (_, _servicer, address):
        second = NodeServer(PLAIN, what="gateway")
        with pytest.raises(RuntimeError):
            second.server.add_insecure_port(address)
        await second.stop(0)


async def test_a_host_that_is_not_ours() -> None:
    for host, told in (("192.0.2.1", "is not an address of this machine"), ("no.such.host.invalid", "not an address")):
        server = NodeServer(PLAIN, host, 7010, what="gateway")
        with pytest.raises(NodeError, match=told) as caught:
            await server.start()
        assert caught.value.exit_code == EXIT_UNAVAILABLE
        await server.stop(0)


async def test_listening_for_others_without_protection_is_said(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t").write_text("secret")
    pem = authority.issue("server")
    tls, tokens = {"cert_file": pem.cert, "key_file": pem.key}, {"accept_file": tmp_path / "t"}
    said = []
    for runtime, host in (
        (PLAIN, "127.0.0.1"),
        (PLAIN, "0.0.0.0"),
        (settings(tls), "0.0.0.0"),
        (settings(tls, tokens), "0.0.0.0"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            await NodeServer(runtime, host, what="gateway").stop(0)
        said.append([str(record.msg) for record in caplog.records if "gateway listens on" in str(record.msg)])
    assert [len(lines) for lines in said] == [0, 1, 1, 0]
    assert "without TLS (runtime.tls) and without tokens (runtime.tokens)" in said[1][0]
    assert "TLS" not in said[2][0].replace("without tokens", "")


async def test_health_follows_the_life_of_the_server() -> None:
    status = health_pb2.HealthCheckResponse
    async with serving(PLAIN) as (server, _servicer, address), open_channel(address, PLAIN) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        try:
            assert (await watch.read()).status == status.SERVING
            server.set_serving(SERVICE, False)
            assert (await watch.read()).status == status.NOT_SERVING
            await server.set_serving(SERVICE, True)
            assert (await watch.read()).status == status.SERVING
            assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == status.SERVING
            stopping = asyncio.ensure_future(server.stop(5))
            assert (await watch.read()).status == status.NOT_SERVING
        finally:
            watch.cancel()
        await stopping


async def test_a_stop_lets_running_calls_end_and_bounds_those_that_do_not() -> None:
    for finishes, code in ((True, None), (False, grpc.StatusCode.UNAVAILABLE)):
        async with serving(PLAIN) as (server, servicer, address), open_channel(address, PLAIN) as channel:
            servicer.go_on.clear()
            stub = gateway_pb2_grpc.ToolGatewayServiceStub(channel)
            call = stub.GetCall(gateway_pb2.GetCallRequest(key="k"), timeout=30)
            running = asyncio.ensure_future(call.code())
            await servicer.entered.wait()
            stopping = asyncio.ensure_future(server.stop(20 if finishes else 0.1))
            if finishes:
                servicer.go_on.set()
            assert (await running) == (code or grpc.StatusCode.OK)
            await stopping


async def test_reflection_lists_the_services() -> None:
    async with serving(PLAIN) as (_, _servicer, address), open_channel(address, PLAIN) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names


async def test_waiting_for_a_peer_that_comes_late() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    waited = asyncio.Event()
    told: list[str] = []

    def on_wait(sentence: str) -> None:
        told.append(sentence)
        waited.set()

    async with open_channel(address, PLAIN) as channel:
        waiting = asyncio.ensure_future(
            wait_ready(channel, address, PLAIN, timeout_s=30, what="the gateway", on_wait=on_wait, every_s=0.2)
        )
        await waited.wait()
        async with serving(PLAIN, port=port):
            await waiting
    assert told[0].startswith(f"waiting for the gateway at {address} (")


async def test_waiting_for_a_peer_that_never_comes() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        async with open_channel(address, PLAIN) as channel:
            with pytest.raises(NodeError, match=f"the gateway at {address} did not answer within 0.3 s") as caught:
                await wait_ready(channel, address, PLAIN, timeout_s=0.3, what="the gateway")
    assert caught.value.exit_code == EXIT_UNAVAILABLE
    assert "Connection refused" in str(caught.value)


async def test_a_peer_that_accepts_and_says_nothing_is_not_ready() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with open_channel(address, PLAIN) as channel:
            with pytest.raises(NodeError, match=r"did not answer within 0\.3 s"):
                await wait_ready(channel, address, PLAIN, timeout_s=0.3, what="the gateway")
