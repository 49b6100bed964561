"""Odd values in the gateway's settings are refused before they reach a timer or a message."""

from __future__ import annotations

import pytest

from node_runtime.settings import SettingsError, load
from node_runtime.settings.schema import schema_keys
from tool_gateway.settings import GatewaySettings

TIMES = [key.key for key in schema_keys({"gateway": GatewaySettings}) if key.key.endswith("_s")]


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
