"""The sections of the one settings file, with the class of each owner.

Invariant: imports neither torch nor vLLM, so that settings can be checked where neither is installed.
"""

from __future__ import annotations

from collections.abc import Mapping

from fermata_cli.cluster.settings import ClusterSettings
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import Section
from rollout_node.settings import RolloutSettings
from tool_backend.settings import BackendSettings
from tool_gateway.settings import GatewaySettings
from trainer_node.settings import TrainerSettings

ALL_SECTIONS: Mapping[str, type[Section]] = {
    "runtime": RuntimeSettings,
    "gateway": GatewaySettings,
    "backend": BackendSettings,
    "rollout": RolloutSettings,
    "trainer": TrainerSettings,
    "cluster": ClusterSettings,
}
