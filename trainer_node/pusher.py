"""The policy's weights on their way to the nodes: `publish.Pusher` over `trainer_node.weights.WeightSync`.

Invariant: what is sent and what the probes are compared with is the same policy: nothing else uses the model meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc.aio

from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.segments import Version
from trainer_node.model import PolicyModel
from trainer_node.publish import NodeProof, PushResult
from trainer_node.settings import TrainerSettings
from trainer_node.weights import NodeReport, WeightSync


class WeightPusher:
    """One transfer group over the nodes of the last push, made anew when they change."""

    def __init__(self, model: PolicyModel, settings: TrainerSettings) -> None:
        self._model = model
        self._settings = settings.sync
        self._sync: WeightSync | None = None

    async def push(
        self, members: Mapping[str, grpc.aio.Channel], version: Version, probes: Sequence[Sequence[int]]
    ) -> PushResult:
        if self._sync is None:
            self._sync = await WeightSync.open(
                members,
                self._settings.backend,
                host=self._settings.host,
                step_timeout_s=self._settings.timeout_s,
                tolerance=self._settings.tolerance,
            )
        else:
            self._sync.set_members(members)
        report = await self._sync.push(
            version.to_proto(), self._model.named_tensors, probes, self._model.probe_logprobs
        )
        return PushResult({member: to_proof(node) for member, node in report.nodes.items()}, dict(report.seconds))

    async def close(self) -> None:
        if self._sync is not None:
            await self._sync.close()


def to_proof(report: NodeReport) -> NodeProof:
    proof = report.proof
    if proof is None:
        # It refused a step, or its engine died on the way: it has proven nothing, and nothing is proven against it.
        return NodeProof(holds=False, reached=False, detail=report.error)
    return NodeProof(
        holds=report.holds,
        reached=report.reached,
        detail=report.error or proof.detail,
        tensors=report.tensors,
        received_equal=proof.received_equal,
        probe_tokens=proof.probe_tokens,
        probe_mean_diff=proof.probe_mean_diff,
        probe_max_diff=proof.probe_max_diff,
    )


def make_pusher(model: PolicyModel, settings: TrainerSettings, runtime: RuntimeSettings) -> WeightPusher:
    return WeightPusher(model, settings)
