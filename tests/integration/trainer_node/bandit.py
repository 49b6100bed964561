"""A policy server of few lines for tests of the whole trainer: it samples two tokens from the weights that were pushed.

The reward is 1 where the first sampled token is below 16 of 48: about a third at first, and to be learnt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from node_runtime.segments import Columns, Version
from tests.integration.trainer_node.scripted_node import ScriptedNode
from tests.unit.trainer_node.builders import tiny_module
from trainer_node.model import PolicyModel
from trainer_node.publish import NodeProof, PushResult
from trainer_node.pusher import to_proof
from trainer_node.weights import NodeReport

GOOD = 16


def good_first_token(task, answer, trajectory) -> float:
    return float(int(answer) < GOOD)


def broken(task, answer, trajectory) -> float:
    raise RuntimeError("the grader's disk is full")


class BanditNode(ScriptedNode):
    """Each trajectory parks once for a calculator call, and goes on."""

    def __init__(self, *, faulty_share: float = 0.0, **fields) -> None:
        super().__init__(self._play, **fields)
        self.module = tiny_module()
        self.faulty_share = faulty_share
        self.played = 0
        self._known: dict[tuple[Version, tuple[int, ...]], torch.Tensor] = {}

    async def _play(self, _node, start: pb.RunRequest.Start, snapshot: pb.Snapshot | None) -> None:
        self.played += 1
        if snapshot is not None and snapshot.pending:
            columns = Columns.unpack(snapshot.segments)
            self._second_turn(start, columns, snapshot.pending[0].key)
            return
        columns = Columns()
        columns.append(pb.SEGMENT_KIND_PROMPT, [40, 41, 42])
        self._sample(columns)
        if not start.tools:
            self.finish(start, columns, "47", generate_us=1000)
            return
        key = self.key(start)
        self.park(start, columns, key)
        if self.played * self.faulty_share % 1 + self.faulty_share >= 1:
            self.fail(start, tool_pb2.OUTCOME_INDETERMINATE, keys=[key])
            return
        await self.until(lambda: any(ack.trajectory_id == start.trajectory_id for ack in self.acks))
        self._second_turn(start, columns, key)

    def _second_turn(self, start: pb.RunRequest.Start, columns: Columns, key: str) -> None:
        held, first = len(columns.segments), columns.ids[3]
        columns.append(pb.SEGMENT_KIND_TOOL, [43, 44], turn=1, call_key=key)
        self._sample(columns, turn=1)
        self.finish(start, columns, str(first), keys=[key], seq=2, base=held, generate_us=1000, tool_wait_us=3000)

    def _logprobs(self, version: Version, ids: tuple[int, ...]) -> torch.Tensor:
        """There are few different texts: each is computed once per version."""
        known = self._known.get((version, ids))
        if known is None:
            with torch.no_grad():
                known = torch.log_softmax(self.module(input_ids=torch.tensor([ids])).logits[0, -1], -1)
            self._known[version, ids] = known
        return known

    def _sample(self, columns: Columns, turn: int = 0) -> int:
        logprobs = self._logprobs(self.version, tuple(columns.ids))
        token = int(torch.multinomial(logprobs.exp(), 1))
        columns.append(
            pb.SEGMENT_KIND_MODEL, [token], logprobs=[float(logprobs[token])], version=self.version, turn=turn
        )
        return token


class DirectPusher:
    """Copies weights into the nodes of this process; says what it measured."""

    def __init__(
        self, model: PolicyModel, nodes: Sequence[BanditNode], *, spoil_push: int = 0, refuse_at: int = -1
    ) -> None:
        """`refuse_at`: index of a node that refuses every step of every sync."""
        self.model = model
        self.nodes = nodes
        self.pushes = 0
        self.spoil_push = spoil_push
        self.refuse_at = refuse_at
        self.refused = 0
        self.closed = False

    async def push(self, members: Mapping[str, object], version, probes) -> PushResult:
        self.pushes += 1
        proofs = {}
        tensors = dict(self.model.named_tensors())
        wanted = self.model.probe_logprobs([list(probe) for probe in probes])
        for member in members:
            node = next(node for node in self.nodes if member.startswith(node.address))
            if self.nodes.index(node) == self.refuse_at:
                self.refused += 1
                proofs[member] = to_proof(NodeReport(member, error=f"{member} answered Start: its engine has ended"))
                continue
            missing, unknown = node.module.load_state_dict({k: v.clone() for k, v in tensors.items()}, strict=False)
            assert not unknown
            assert not missing
            node.version = version
            if self.pushes == self.spoil_push:
                proofs[member] = NodeProof(holds=False, detail="tensor lm_head.weight differs", tensors=len(tensors))
                continue
            served = PolicyModel(node.module, self.model.path, self.model.device)
            got = served.probe_logprobs([list(probe) for probe in probes])
            differences = [abs(a - b) for x, y in zip(wanted, got, strict=True) for a, b in zip(x, y, strict=True)]
            proofs[member] = NodeProof(
                holds=True,
                tensors=len(tensors),
                received_equal=True,
                probe_tokens=len(differences),
                probe_mean_diff=sum(differences) / len(differences),
                probe_max_diff=max(differences),
            )
        return PushResult(proofs, {"total": 0.0})

    async def close(self) -> None:
        self.closed = True
