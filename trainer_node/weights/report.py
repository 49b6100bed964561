"""What a sync came to, per node and in all. Imports without torch.

Invariants: every node a push was meant for has a report; a report holds only with a proof that holds, and one that does
not says why in a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fermata.v1 import weights_pb2 as pb


@dataclass
class NodeReport:
    """One node's end of a push. `reached=False`: it went away meanwhile, which proves nothing against it."""

    node: str
    holds: bool = False
    reached: bool = True
    error: str = ""
    proof: pb.Proof | None = None
    tensors: int = 0  # digests sent for comparison
    seconds: dict[str, float] = field(default_factory=dict)  # pause, receive, load, prove, paused


@dataclass
class SyncReport:
    """All nodes of a push. Seconds by phase as the trainer saw them: group, start, transfer, finish, total."""

    version: pb.WeightVersion
    nodes: dict[str, NodeReport] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Every node serves this version, proven."""
        return bool(self.nodes) and all(node.holds for node in self.nodes.values())

    @property
    def failed(self) -> dict[str, str]:
        """Why, by node."""
        return {node.node: node.error for node in self.nodes.values() if not node.holds}

    @property
    def digests_verified(self) -> int:
        """Tensors whose bytes were proven to have arrived as sent, over all nodes."""
        return sum(n.tensors for n in self.nodes.values() if n.proof is not None and n.proof.received_equal)

    @property
    def probe_max_diff(self) -> float:
        return max((n.proof.probe_max_diff for n in self._probed()), default=0.0)

    @property
    def probe_mean_diff(self) -> float:
        """Mean absolute difference over all probe tokens of all nodes."""
        tokens = sum(n.proof.probe_tokens for n in self._probed())
        total = sum(n.proof.probe_mean_diff * n.proof.probe_tokens for n in self._probed())
        return total / tokens if tokens else 0.0

    def _probed(self) -> list[NodeReport]:
        return [n for n in self.nodes.values() if n.proof is not None and n.proof.probe_tokens]


def differing_shards(proofs: Mapping[str, pb.Proof]) -> dict[str, str]:
    """Part (b) across nodes: which nodes hold other bytes than the most of those with the same layout, and where.

    Where no majority exists nobody can be told to be right: all of them are named.
    """
    by_place: dict[tuple[str, int], dict[bytes, list[str]]] = {}
    for node, proof in proofs.items():
        for shard in proof.shards:
            by_place.setdefault((shard.layout_fingerprint, shard.worker), {}).setdefault(shard.digest, []).append(node)
    wrong: dict[str, str] = {}
    for (_layout, worker), holders in by_place.items():
        if len(holders) < 2:
            continue
        ranked = sorted(holders.values(), key=len, reverse=True)
        suspects = ranked if len(ranked[0]) == len(ranked[1]) else ranked[1:]
        for node in (node for group in suspects for node in group):
            wrong[node] = f"worker {worker} of {node} holds other bytes than nodes with the same layout"
    return wrong
