"""The files of TLS, and what is said of certificates that are not right: over real sockets where peers are asked."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from fermata_cli.cluster.certificates import Authority, Pem
from node_runtime import addresses, grpc_server
from node_runtime.credentials import channel_credentials, metrics_context
from node_runtime.errors import EXIT_UNAVAILABLE, EXIT_USAGE, NodeError
from node_runtime.grpc_channel import open_channel, wait_ready
from node_runtime.grpc_server import NodeServer
from node_runtime.handshake import refusal
from node_runtime.metrics import start_metrics, stop_metrics
from node_runtime.runtime_settings import RuntimeSettings, TlsSettings

DAY = datetime.timedelta(days=1)
PKCS8, OLD = serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL
BROKEN = "-----BEGIN {0}-----\nQUJDREVG\n-----END {0}-----\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def settings(pem: Pem | None = None, authority: Authority | None = None, **more: Any) -> RuntimeSettings:
    tls: dict[str, Any] = {"cert_file": pem.cert, "key_file": pem.key} if pem else {}
    if authority is not None:
        tls["ca_file"] = authority.ca_file
    return RuntimeSettings.model_validate({"tls": tls | more})


def users(runtime: RuntimeSettings) -> list[Callable[[], object]]:
    """Everybody who reads these files."""
    with_metrics = runtime.model_copy(update={"metrics_tls": True})
    return [
        lambda: NodeServer(runtime, what="gateway"),
        lambda: channel_credentials(runtime.tls),
        lambda: metrics_context(with_metrics),
    ]


def refused(runtime: RuntimeSettings, who: list[Callable[[], object]]) -> set[str]:
    told = set()
    for use in who:
        with pytest.raises(NodeError) as caught:
            use()
        assert caught.value.exit_code == EXIT_USAGE
        told.add(str(caught.value))
    return told


def test_files_that_are_not_what_they_should_be(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("server"), authority.issue("other")
    key = serialization.load_pem_private_key(good.key.read_bytes(), None)
    locked = key.private_bytes(serialization.Encoding.PEM, PKCS8, serialization.BestAvailableEncryption(b"x"))
    made = {
        "empty": b"",
        "text": b"hello",
        "half": good.cert.read_bytes()[:300],
        "broken.pem": BROKEN.format("CERTIFICATE").encode(),
        "broken.key": BROKEN.format("PRIVATE KEY").encode(),
        "locked": locked,
        "big": b" " * (1 << 20) + good.cert.read_bytes(),
        "authority first": authority.ca_file.read_bytes() + good.cert.read_bytes(),
    }
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    for cert, private, words in (
        (tmp_path / "none", good.key, "runtime.tls.cert_file: {0} does not exist: name an existing file"),
        (tmp_path, good.key, "runtime.tls.cert_file: {0} cannot be read: Is a directory"),
        (tmp_path / "empty", good.key, "runtime.tls.cert_file: {0} holds no PEM certificate: give a PEM file"),
        (tmp_path / "text", good.key, "runtime.tls.cert_file: {0} holds no PEM certificate: give a PEM file"),
        (tmp_path / "half", good.key, "runtime.tls.cert_file: {0} holds a certificate that cannot be read: "),
        (tmp_path / "broken.pem", good.key, "runtime.tls.cert_file: {0} holds a certificate that cannot be read: "),
        (tmp_path / "big", good.key, "runtime.tls.cert_file: {0} has more than the 1048576 bytes"),
        (good.cert, good.cert, "runtime.tls.key_file: {1} holds no PEM private key: give a PEM file"),
        (good.cert, tmp_path / "broken.key", "runtime.tls.key_file: {1} holds a private key that cannot be read: "),
        (good.cert, tmp_path / "locked", "runtime.tls.key_file: {1} holds an encrypted key, "),
        (good.cert, other.key, "runtime.tls: the key in {1} is not that of the first certificate in {0}: name "),
        (tmp_path / "authority first", good.key, "runtime.tls: the key in {1} is not that of the first certificate in"),
    ):
        runtime = settings(Pem(cert, private))
        (told,) = refused(runtime, users(runtime))
        assert told.startswith(words.format(cert, private)), told
    (tmp_path / "one broken").write_bytes(authority.ca_file.read_bytes() + made["broken.pem"])
    for name in ("none", "empty", "text", "half", "broken.pem", "one broken"):
        runtime = settings(good, ca_file=tmp_path / name, require_client_cert=True)
        (told,) = refused(runtime, users(runtime)[:2])
        assert told.startswith(f"runtime.tls.ca_file: {tmp_path / name} "), told
    (told,) = refused(settings(None, authority), [lambda: NodeServer(settings(None, authority), what="gateway")])
    assert "this process serves: name its cert_file and key_file too" in told


@pytest.mark.parametrize("name", ["", "a b", "gateway.example:443", "gäteway", "a" * 64, "a" * 60 + ".b" * 100])
def test_a_server_name_that_can_be_none_is_refused_with_the_settings(name: str) -> None:
    with pytest.raises(ValueError, match="can be no name of a server: write it as it stands in the certificate"):
        TlsSettings(server_name=name)


async def reach(address: str, runtime: RuntimeSettings) -> None:
    async with open_channel(address, runtime) as channel:
        await wait_ready(channel, address, runtime, timeout_s=20, what="the gateway")


async def serve(stack: AsyncExitStack, runtime: RuntimeSettings, host: str = "127.0.0.1") -> str:
    server = NodeServer(runtime, host, what="gateway")
    port = await server.start()
    stack.push_async_callback(server.stop, 0)
    return addresses.join(host, port)


async def test_keys_of_any_kind_either_work_or_are_refused(authority: Authority) -> None:
    for number, (key, form, speaks) in enumerate(
        (
            (ec.generate_private_key(ec.SECP256R1()), OLD, True),
            (ec.generate_private_key(ec.SECP384R1()), PKCS8, True),
            (rsa.generate_private_key(65537, 2048), PKCS8, True),
            (rsa.generate_private_key(65537, 2048), OLD, True),
            (ec.generate_private_key(ec.SECP521R1()), PKCS8, False),
            (ec.generate_private_key(ec.SECP256K1()), PKCS8, False),
            (ed25519.Ed25519PrivateKey.generate(), PKCS8, False),
        )
    ):
        pem = authority.issue(f"kind-{number}", key=key)
        pem.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        runtime = settings(pem, authority, require_client_cert=True)
        if speaks:
            async with AsyncExitStack() as stack:
                await reach(await serve(stack, runtime), runtime)
        else:
            (told,) = refused(runtime, users(runtime))
            assert "holds a key of a kind that gRPC does not speak: make one for the curve P-256" in told


async def test_a_bundle_line_ends_and_marks_of_editors_do_not_matter(authority: Authority, tmp_path: Path) -> None:
    stranger, pem = Authority(tmp_path, "stranger"), authority.issue("server")
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(
        "# wem wir trauen: größte\n".encode() + stranger.ca_file.read_bytes() + authority.ca_file.read_bytes()
    )
    for number, change in enumerate((lambda b: b, lambda b: b.replace(b"\n", b"\r\n"), lambda b: b"\xef\xbb\xbf" + b)):
        copies = []
        for file in (bundle, pem.cert, pem.key):
            copies.append(tmp_path / f"{number}-{file.name}")
            copies[-1].write_bytes(change(file.read_bytes()))
        runtime = settings(Pem(*copies[1:]), ca_file=copies[0], require_client_cert=True)
        async with AsyncExitStack() as stack:
            await reach(await serve(stack, runtime), runtime)


async def test_certificates_out_of_their_time(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over, later = (
        authority.issue("over", begins=-2 * DAY, ends=-DAY),
        authority.issue("later", begins=DAY, ends=2 * DAY),
    )
    good = authority.issue("good")
    caplog.set_level("WARNING")
    (told,) = refused(settings(over), [users(settings(over))[0], users(settings(over))[2]])
    assert told.startswith(f"runtime.tls.cert_file: the certificate in {over.cert} expired on 20")
    assert told.endswith(" UTC, and no client trusts it: name a renewed one")
    async with AsyncExitStack() as stack:
        address = await serve(stack, settings(later, authority))
        assert f"the certificate in {later.cert} is not valid before " in caplog.text
        with pytest.raises(NodeError, match="or its authority's, is not valid yet: set the clocks") as caught:
            await reach(address, settings(None, authority))
        assert caught.value.exit_code == EXIT_UNAVAILABLE
    async with AsyncExitStack() as stack:
        address = await serve(stack, settings(good, authority, require_client_cert=True))
        for pem, words in (
            (over, r"which expired on 20.*: name one that is valid now"),
            (later, "which is not valid before"),
        ):
            with pytest.raises(NodeError, match=f"does not accept the certificate in .*{pem.cert.name}.*{words}"):
                await reach(address, settings(pem, authority))
    # One that ends while it is shown.
    monkeypatch.setattr("node_runtime.tls_files.Chain.expired", False)
    monkeypatch.setattr("node_runtime.tls_files.Chain.why_not_now", None)
    async with AsyncExitStack() as stack:
        address = await serve(stack, settings(over, authority))
        with pytest.raises(NodeError, match="or its authority's, has expired: renew it, and start that process again"):
            await reach(address, settings(None, authority))


async def test_each_way_to_an_address_is_checked_by_its_own_name(authority: Authority) -> None:
    pem, other = authority.issue("server"), authority.issue("other", hosts=("gateway.example",), ips=("10.1.2.3",))
    trusting = settings(None, authority)
    async with AsyncExitStack() as stack:
        v6, v4 = await serve(stack, settings(pem), "::1"), await serve(stack, settings(pem))
        for address in (v6, v4, v4.replace("127.0.0.1", "localhost"), v4.replace("127.0.0.1", "LOCALHOST")):
            await reach(address, trusting)
        wrong = await serve(stack, settings(other), "::1")
        with pytest.raises(NodeError, match=r"the certificate of \[::1\]:\d+ is not for ::1: connect to a name that"):
            await reach(wrong, trusting)
        for name in ("gateway.example", "Gateway.Example.", "10.1.2.3"):
            await reach(wrong, settings(None, authority, server_name=name))


async def test_a_socket_of_this_machine_is_localhost(authority: Authority, tmp_path: Path) -> None:
    pem, other = authority.issue("server"), authority.issue("other", hosts=("gateway.example",), ips=())
    address = f"unix:{tmp_path}/s"
    for there, here, words in (
        (settings(pem, authority, require_client_cert=True), settings(pem, authority), None),
        (settings(other), settings(None, authority, server_name="gateway.example"), None),
        (settings(other), settings(None, authority), "is not for localhost: connect to a name that stands in it"),
        (settings(), settings(None, authority), "speaks no TLS and this process does"),
        (settings(pem), settings(), "speaks TLS and this process does not"),
    ):
        server = NodeServer(there, what="gateway")
        if there.tls.enabled:
            server.server.add_secure_port(address, server._credentials)
        else:
            server.server.add_insecure_port(address)
        await server.server.start()
        try:
            if words is None:
                await reach(address, here)
            else:
                with pytest.raises(NodeError, match=words):
                    await reach(address, here)
        finally:
            await server.server.stop(0)


async def test_a_server_of_the_web_is_no_gateway(authority: Authority) -> None:
    pem = authority.issue("web")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem.cert, pem.key)

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        address = addresses.join("127.0.0.1", server.sockets[0].getsockname()[1])
        for protocols in ([], ["http/1.1"]):
            if protocols:
                context.set_alpn_protocols(protocols)
            told = await refusal(address, settings(None, authority))
            assert told == f"{address} speaks TLS and no HTTP/2, which gRPC needs: correct the address"
    port = start_metrics(RuntimeSettings(metrics_port=0))
    try:
        with pytest.raises(
            NodeError, match=f"127.0.0.1:{port} speaks HTTP/1 and no gRPC: correct the address, which may"
        ):
            await reach(f"127.0.0.1:{port}", settings())
    finally:
        await asyncio.to_thread(stop_metrics, port)


async def test_who_cannot_be_judged_is_not(authority: Authority, tmp_path: Path) -> None:
    pem = authority.issue("server")
    runtime = settings(pem, authority)
    async with AsyncExitStack() as stack:
        address = await serve(stack, runtime)
        assert await refusal(address, runtime) is None
        for file in (pem.key, authority.ca_file):  # in the middle of being replaced
            whole = file.read_bytes()
            file.unlink()
            assert await refusal(address, runtime) is None
            file.write_bytes(b"")
            assert await refusal(address, runtime) is None
            file.write_bytes(whole)
    assert await refusal(f"unix:{tmp_path}/nobody", runtime) is None


@pytest.mark.parametrize("encrypted", [True, False])
async def test_who_connects_and_says_nothing_is_cut_off(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    """Each holds a file descriptor; by default for two minutes."""
    options = dict(grpc_server.SERVER_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] == 10_000
    options["grpc.server_handshake_timeout_ms"] = 200
    monkeypatch.setattr(grpc_server, "SERVER_OPTIONS", tuple(options.items()))
    async with AsyncExitStack() as stack, asyncio.timeout(8):
        address = await serve(stack, settings(authority.issue("server")) if encrypted else settings())
        reader, writer = await asyncio.open_connection(*addresses.split(address))
        while await reader.read(100):  # a plain server greets
            pass
        writer.close()


def test_certificates_of_the_demo_please_the_strictest_reader(authority: Authority) -> None:
    pem = authority.issue("server")
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=authority.ca_file)
    server.load_cert_chain(pem.cert, pem.key)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    there = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (here, there, here, there):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert here.getpeercert()
