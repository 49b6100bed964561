"""Odd values in the gateway's settings are refused before they reach a timer or a message."""

from __future__ import annotations

import pytest

from node_runtime.settings import SettingsError, load
from node_runtime.settings.schema import schema_keys
from tool_gateway.settings import GatewaySettings

KEYS = [key.key for key in schema_keys({"gateway": GatewaySettings})]
TIMES = [key for key in KEYS if key.endswith("_s") and "[]" not in key]


@pytest.mark.parametrize("key", TIMES)
@pytest.mark.parametrize("value", ["1e30", "-1", ".inf", ".nan", "null", '"5"'])
def test_a_time_out_of_all_bounds_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(SettingsError, match=key.replace(".", r"\.")):
        load({"gateway": GatewaySettings}, file=None, env={}, overrides=[f"{key}={value}"])


@pytest.mark.parametrize(
    "override",
    [
        "gateway.port=-1",
        "gateway.port=65536",
        "gateway.pools=null",
        "gateway.heartbeat_interval_s=0.0001",
        "gateway.limits.frame_bytes=1000000000",
        "gateway.limits.max_output_bytes=100000000",
    ],
)
def test_other_odd_values_are_refused(override: str) -> None:
    with pytest.raises(SettingsError, match=r"must be"):
        load({"gateway": GatewaySettings}, file=None, env={}, overrides=[override])


def pools(*texts: str) -> GatewaySettings:
    override = f"gateway.pools=[{', '.join('{' + text + '}' for text in texts)}]"
    loaded = load({"gateway": GatewaySettings}, file=None, env={}, overrides=[override])["gateway"]
    assert isinstance(loaded, GatewaySettings)
    return loaded


def test_a_pool_of_a_name_has_its_defaults() -> None:
    (pool,) = pools("name: calc, dns: 'fermata-tool-calculator:7020'").pools
    assert (pool.dns, pool.addresses, pool.resolve_s, pool.max_addresses) == (
        "fermata-tool-calculator:7020",
        (),
        5.0,
        256,
    )


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["name: a"], "has neither addresses nor dns: name the replicas in addresses, or a name"),
        (["name: a, addresses: []"], "has neither addresses nor dns"),
        (["name: a, addresses: ['h:1'], dns: 'h:1'"], "has both addresses and dns"),
        (["name: a, dns: 'h'"], "'h' is not an address: write host:port"),
        (["name: a, dns: '10.0.0.1:7020'"], "which is no name to look up: write it under addresses"),
        (["name: a, dns: '[::1]:7020'"], "which is no name to look up"),
        (["name: a, dns: 'unix:/tmp/socket'"], "'unix:/tmp/socket' has no port"),
        (["name: a, dns: 'a..b:7020'"], "'a..b:7020' has no host: write a name"),
        (["name: a, dns: '" + 64 * "x" + ":7020'"], "has no host: write a name"),
        (["name: a, addresses: ['a..b:7020']"], "'a..b:7020' has no host: write a name"),
        (["name: a, dns: 'h:1', resolve_s: 0"], r"resolve_s.* must be"),
        (["name: a, dns: 'h:1', resolve_s: .inf"], r"resolve_s.* must be"),
        (["name: a, dns: 'h:1', max_addresses: 0"], r"max_addresses.* must be"),
        (["name: a, dns: 'h:1'", "name: b, dns: 'h:1'"], "has an address in two pools"),
        (["name: a, dns: 'h:1'", "name: b, addresses: ['h:1']"], "has an address in two pools"),
    ],
)
def test_a_pool_is_addresses_or_a_name(texts: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        pools(*texts)
