"""Which step of a sync may follow which: pure, no engine, no clock.

Invariants: a step that does not fit is refused in one sentence and changes nothing; a number of a lineage never goes
back; tensors touched without a proof in the end make the phase FAILED until a full sync proves itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fermata.v1 import weights_pb2 as pb


def describe(version: pb.WeightVersion) -> str:
    return f"{version.number} of lineage {version.lineage or '(none)'}"


@dataclass
class SyncState:
    """The node's side of the weight sync protocol."""

    served: pb.WeightVersion = field(default_factory=pb.WeightVersion)
    phase: pb.SyncPhase.ValueType = pb.SYNC_PHASE_IDLE
    group_generation: int = 0
    group_lineage: str | None = None  # None: in no group
    syncing: pb.WeightVersion | None = None
    kv_policy: pb.KvPolicy.ValueType = pb.KV_POLICY_RECOMPUTE
    failed_before: bool = False  # the phase to fall back to when a sync is given up untouched

    def refuse_init(self, context: pb.SyncContext) -> str | None:
        if self.syncing is not None:
            return f"Init during the sync of version {describe(self.syncing)}: Abort it first"
        if self.group_lineage == context.version.lineage and context.group_generation <= self.group_generation:
            return (
                f"group generation {context.group_generation} is not newer than {self.group_generation}: "
                "each Init makes the group's next generation"
            )
        return None

    def joined(self, context: pb.SyncContext) -> None:
        self.group_generation = context.group_generation
        self.group_lineage = context.version.lineage

    def left(self) -> None:
        self.group_lineage = None
        self.group_generation = 0

    def refuse_start(self, request: pb.StartRequest) -> str | None:
        version = request.context.version
        if self.syncing is not None:
            return f"Start during the sync of version {describe(self.syncing)}: Finish or Abort it first"
        if request.kind not in (pb.UPDATE_KIND_UNSPECIFIED, pb.UPDATE_KIND_FULL):
            kind = pb.UpdateKind.Name(request.kind) if request.kind in pb.UpdateKind.values() else str(request.kind)
            return f"update kind {kind} is not supported by this node: send UPDATE_KIND_FULL"
        if request.context.target.adapter_id:
            return f"adapter {request.context.target.adapter_id!r} is not served here: name only the model"
        if self.group_lineage is None:
            return "Start before Init: the node is in no transfer group"
        if (problem := self._foreign(request.context)) is not None:
            return problem
        if version.lineage == self.served.lineage and version.number < self.served.number:
            return (
                f"version {describe(version)} is older than {self.served.number}, which is served: numbers only go up"
            )
        return None

    def start(self, request: pb.StartRequest) -> None:
        self.failed_before = self.phase == pb.SYNC_PHASE_FAILED
        self.phase = pb.SYNC_PHASE_STARTED
        self.syncing = request.context.version
        keep = request.kv_policy == pb.KV_POLICY_KEEP
        self.kv_policy = pb.KV_POLICY_KEEP if keep else pb.KV_POLICY_RECOMPUTE

    def refuse_step(self, step: str, context: pb.SyncContext, *phases: pb.SyncPhase.ValueType) -> str | None:
        """For Update and Finish."""
        if self.syncing is None:
            return f"{step} before Start: no sync is under way"
        if context.version != self.syncing:
            return (
                f"{step} for version {describe(context.version)} during the sync of version {describe(self.syncing)}: "
                "one sync at a time"
            )
        if (problem := self._foreign(context)) is not None:
            return problem
        if self.phase not in phases:
            return f"{step} in phase {pb.SyncPhase.Name(self.phase)}: no tensors were received, Update comes before"
        return None

    def updating(self) -> None:
        self.phase = pb.SYNC_PHASE_UPDATING

    def proving(self) -> None:
        self.phase = pb.SYNC_PHASE_PROVING

    def proven(self) -> None:
        assert self.syncing is not None
        self.served = self.syncing
        self.syncing = None
        self.phase = pb.SYNC_PHASE_IDLE

    def given_up(self, *, touched: bool) -> bool:
        """The sync ends without a proof. Returns whether the node may go on serving the old version."""
        self.syncing = None
        usable = not touched and not self.failed_before
        self.phase = pb.SYNC_PHASE_IDLE if usable else pb.SYNC_PHASE_FAILED
        return usable

    def failed(self) -> None:
        self.syncing = None
        self.phase = pb.SYNC_PHASE_FAILED

    def _foreign(self, context: pb.SyncContext) -> str | None:
        if context.version.lineage != self.group_lineage:
            return f"lineage {context.version.lineage} is not the transfer group's ({self.group_lineage}): Init first"
        if context.group_generation != self.group_generation:
            return f"group generation {context.group_generation} is not the present {self.group_generation}: Init first"
        return None
