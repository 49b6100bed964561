"""vLLM's entry point to Fermata (`vllm.general_plugins`), called in every process of an engine.

Invariant: registering is idempotent and imports neither gRPC nor torch by itself.
"""

from __future__ import annotations


def register() -> None:
    """Adds the gloo weight-transfer engine and ties the process to the node that owns it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rollout_node.engine_env import end_with_owner

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", "rollout_node.weights.gloo", "GlooWeightTransferEngine")
    end_with_owner()
