"""Every option name exists in the installed gRPC library: unknown names are ignored by it without a word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from node_runtime import grpc_options

OPTIONS = {**dict(grpc_options.SERVER_OPTIONS), **dict(grpc_options.CHANNEL_OPTIONS)}
OPTIONS |= dict(grpc_options.KEEPALIVE_OPTIONS) | {"grpc.ssl_target_name_override": ""}


@pytest.fixture(scope="module")
def library() -> bytes:
    return Path(cygrpc.__file__).read_bytes()


def known(library: bytes, name: str) -> bool:
    """The library holds the name as a whole C string (before it may stand data that ends in no zero byte)."""
    return re.search(rb"(?<![A-Za-z_.])" + re.escape(name.encode()) + rb"\0", library) is not None


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_library_knows(library: bytes, name: str) -> None:
    assert known(library, name)


@pytest.mark.parametrize(
    "name",
    [
        "grpc.http2.min_recv_ping_interval_without_data_ms",  # widely copied, never existed
        "grpc.http2.min_ping_interval_without_data",
        "grpc.server.max_pending_request",
    ],
)
def test_a_misspelt_name_would_be_caught(library: bytes, name: str) -> None:
    assert not known(library, name)


def test_no_option_is_given_twice_with_two_values() -> None:
    for options in (
        grpc_options.SERVER_OPTIONS,
        (*grpc_options.CHANNEL_OPTIONS, *grpc_options.KEEPALIVE_OPTIONS),
    ):
        names = [name for name, _ in options]
        assert len(names) == len(set(names))


def test_our_clients_ping_no_more_often_than_our_servers_allow() -> None:
    server, client = dict(grpc_options.SERVER_OPTIONS), dict(grpc_options.KEEPALIVE_OPTIONS)
    assert client["grpc.keepalive_time_ms"] >= server["grpc.http2.min_ping_interval_without_data_ms"]
