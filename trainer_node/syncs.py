"""Which nodes have proven this run's weights, and when the others are synced again.

Invariant: `joined` is set whenever a node is there that has no proven weights and may be asked for a sync now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from trainer_node.assignment import NodeView

# A node that could not be synced is tried again after this, doubling: what it has open may wait for the weights, and a
# step that waits for that never comes to its own sync. Not often: while a frozen node is tried, the others stand.
RESYNC_S, MAX_RESYNC_S = 15.0, 240.0


class Syncs:
    """Call on the event loop. `nodes`: the trainer's, by address."""

    def __init__(self, nodes: Mapping[str, NodeView]) -> None:
        self.joined = asyncio.Event()
        self._nodes = nodes
        self._later: dict[str, asyncio.TimerHandle] = {}

    def connected(self, node: NodeView, *, fresh: bool) -> None:
        """It said Welcome; `fresh`: as a process that was not there before."""
        if fresh or not node.synced:
            self.joined.set()

    def ended(self, members: Collection[str], asked: Collection[str] | None = None) -> None:
        """These members have proven that they serve this run's weights: only they get trajectories.

        `asked`: whom that sync was for. One of them that could not prove itself waits for the next, or asks for one
        later; `joined` stays set for those alone who came after it began.
        """
        for node in self._nodes.values():
            node.synced = node.member in members
            if (later := self._later.pop(node.address, None)) is not None:
                later.cancel()
            if node.synced or asked is None or node.member not in asked:
                node.failed_syncs = 0
            else:
                pause = min(MAX_RESYNC_S, RESYNC_S * 2**node.failed_syncs)
                node.failed_syncs = min(node.failed_syncs + 1, 8)
                later = asyncio.get_running_loop().call_later(pause, self._ask, node.address, node.member)
                self._later[node.address] = later
            # Its proof said so; its next Load will, or will not.
            node.serving = node.serving or node.synced
        if not any(
            node.connected and not node.synced and (asked is None or node.member not in asked)
            for node in self._nodes.values()
        ):
            self.joined.clear()

    def _ask(self, address: str, member: str) -> None:
        node = self._nodes[address]
        if node.connected and not node.synced and node.member == member:
            self.joined.set()
