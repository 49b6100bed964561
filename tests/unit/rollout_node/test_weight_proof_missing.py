"""A proof that cannot be made: the node serves nothing, and does not claim that its weights are wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fermata.v1 import tool_pb2
from fermata.v1 import weights_pb2 as pb

from node_runtime.segments import pack_ids
from rollout_node.engine import EngineError
from rollout_node.weights.service import WeightSyncServicer

CONTEXT = pb.SyncContext(version=pb.WeightVersion(lineage="a", number=1), group_generation=1, deadline_ms=200)
TENSOR = pb.TensorMeta(name="w", dtype="float32", shape=[1])
DIED = EngineError("the vLLM engine process has ended", tool_pb2.OUTCOME_INTERNAL, tool_pb2.FAULT_INFRA)


class Engine:
    """Does every step until `breaks_at`, the worker call that raises (DIED) or never returns (None)."""

    workers = 1
    transfer_backends = ("gloo",)
    dtype = "float32"

    def __init__(self, breaks_at: str, error: Exception | None, received: bytes = b"digest") -> None:
        self.breaks_at, self.error, self.received = breaks_at, error, received
        self.serving, self.why_not = True, ""

    async def collective(self, method: str, *_args: Any, timeout_s: float | None = None) -> list[Any]:
        if method == self.breaks_at:
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        if method == "fermata_join_state":
            return [("joined", "")]
        return [{"received": [("w", self.received)], "missing": []}] if method == "fermata_finish" else [None]

    async def pause(self, **_: Any) -> None: ...

    def refuse(self, reason: str) -> None:
        self.serving, self.why_not = False, reason


@pytest.mark.parametrize(
    ("engine", "outcome"),
    [
        (Engine("fermata_finish", DIED), tool_pb2.OUTCOME_INDETERMINATE),
        (Engine("fermata_storage", DIED), tool_pb2.OUTCOME_INDETERMINATE),
        (Engine("fermata_finish", None), tool_pb2.OUTCOME_INDETERMINATE),
        (Engine("fermata_storage", DIED, b"other"), tool_pb2.OUTCOME_INDETERMINATE),
    ],
)
async def test_an_engine_that_dies_or_hangs_while_it_is_proven_proves_nothing(engine: Any, outcome: int) -> None:
    servicer = WeightSyncServicer(engine)
    servicer.state.joined(CONTEXT)
    context: Any = None
    started = await servicer.Start(pb.StartRequest(context=CONTEXT), context)
    assert started.status.outcome == tool_pb2.OUTCOME_OK
    updated = await servicer.Update(pb.UpdateRequest(context=CONTEXT, tensors=[TENSOR]), context)
    assert updated.status.outcome == tool_pb2.OUTCOME_OK
    probe = pb.Probe(token_ids=pack_ids([1, 2]), logprobs=b"\0\0\0\0")
    digest = pb.TensorDigest(name="w", digest=b"digest")
    finished = await servicer.Finish(pb.FinishRequest(context=CONTEXT, digests=[digest], probes=[probe]), context)
    assert finished.status.outcome == outcome
    assert not finished.proof.holds
    assert not finished.serving
    assert "serves nothing until a full sync" in engine.why_not
    await servicer.close()
