"""From what the trainer asks (Start, Resume) to a trajectory, or to one sentence why not.

Invariant: whatever is wrong with a task is said before the engine or a tool hears of it, and disturbs nothing else.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from node_runtime.keys import CallKey, InvalidKey
from node_runtime.segments import Version
from rollout_node import snapshots
from rollout_node.ports import Engine, Offer, TurnFormat
from rollout_node.settings import RolloutSettings
from rollout_node.trajectory import Bounds, Spec, Trajectory
from rollout_node.turn.records import Message, RenderError, ToolDefinition, TurnFormatError
from rollout_node.turn.tool_set import ToolSet

NEVER = -1.0
_MAX_OFFERS = 256
_NAMES_SHOWN = 12


class Refused(Exception):
    """`retry_after_s` below 0: never right on this node. `tools_missing`: it may be right once a tool appears."""

    def __init__(self, sentence: str, retry_after_s: float = NEVER, *, tools_missing: bool = False) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s
        self.tools_missing = tools_missing


class Intake:
    """Checks and builds; holds nothing but the compiled tool sets of recent combinations."""

    def __init__(
        self, settings: RolloutSettings, engine: Engine, turns: TurnFormat, identity: snapshots.Identity
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._turns = turns
        self._identity = identity
        self._offers: OrderedDict[tuple[tuple[str, str], ...], Offer] = OrderedDict()

    def check(self, start: pb.RunRequest.Start, run_id: str) -> None:
        """What can be said without the tools and the prompt."""
        if start.run_id != run_id:
            raise Refused(f"the trajectory is of run {start.run_id!r} and this stream of run {run_id!r}")
        try:
            CallKey(start.run_id, start.trajectory_id, start.generation, 0, 0)
        except InvalidKey as error:
            raise Refused(f"no call could be named: {error}") from error
        wanted, served = start.model_id, self._settings.model_id
        if wanted and served and wanted != served:
            raise Refused(f"this node serves model {served!r}, the task asks for {wanted!r}")
        if start.adapter_id:
            raise Refused(f"this node serves no adapters, the task asks for {start.adapter_id!r}")
        if start.mode not in (pb.MODE_UNSPECIFIED, pb.MODE_SUSPEND):
            name = pb.Mode.Name(start.mode) if start.mode in pb.Mode.values() else str(start.mode)
            raise Refused(f"this node has no {name}: use MODE_SUSPEND")
        if start.sampling.stop:
            raise Refused(
                "stop texts are not served: turns end at the model's own stop tokens or at max_tokens_per_turn"
            )
        for name, low, high in (("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
            value = getattr(start.sampling, name)
            if not low <= value <= high:
                raise Refused(f"sampling.{name} is {value}: it must be between {low:g} and {high:g}")
        if start.HasField("deadline_ms") and start.deadline_ms <= 0:
            raise Refused("the trajectory's deadline has passed: give it a positive remaining time")

    def new(self, start: pb.RunRequest.Start, catalogue: Mapping[str, tool_pb2.ToolSpec], now: float) -> Trajectory:
        spec = self._spec(start, catalogue)
        try:
            ids = self._turns.render_prompt(_messages(start.messages), spec.offer.definitions)
        except RenderError as error:
            raise Refused(f"the messages cannot be rendered: {error}") from error
        if len(ids) >= spec.bounds.max_context_tokens:
            raise Refused(
                f"the prompt has {len(ids)} tokens and the context at most {spec.bounds.max_context_tokens}: "
                "shorten it, or raise max_context_tokens"
            )
        trajectory = Trajectory(spec, now=now, deadline_at=now + self._deadline_s(start))
        trajectory.set_prompt(ids)
        return trajectory

    def resumed(
        self, resume: pb.RunRequest.Resume, catalogue: Mapping[str, tool_pb2.ToolSpec], now: float
    ) -> Trajectory:
        if not resume.snapshot.segments:
            return self.new(resume.start, catalogue, now)
        spec = self._spec(resume.start, catalogue)
        try:
            return snapshots.restore(
                spec,
                resume.snapshot,
                self._identity,
                now=now,
                held_s=resume.held_ms / 1000,
                deadline_s=self._deadline_s(resume.start),
            )
        except snapshots.SnapshotRefused as error:
            raise Refused(str(error)) from error

    def _deadline_s(self, start: pb.RunRequest.Start) -> float:
        most = self._settings.limits.deadline_s
        return min(most, start.deadline_ms / 1000) if start.HasField("deadline_ms") else most

    def _spec(self, start: pb.RunRequest.Start, catalogue: Mapping[str, tool_pb2.ToolSpec]) -> Spec:
        return Spec(
            run_id=start.run_id,
            trajectory_id=start.trajectory_id,
            generation=start.generation,
            order=start.order,
            bounds=self._bounds(start.limits),
            offer=self._offer(start, catalogue),
            sampling=start.sampling,
            min_version=Version.of(start.min_weight_version),
            group_id=start.group_id,
            grader=start.grader,
            tenant=start.tenant,
            traceparent=start.traceparent,
            context=dict(start.context),
        )

    def _bounds(self, asked: pb.Limits) -> Bounds:
        ours = self._settings.limits
        held = self._engine.max_model_len
        context = min(held, ours.max_context_tokens or held, asked.max_context_tokens or held)
        return Bounds(
            max_turns=asked.max_turns or ours.max_turns,
            max_context_tokens=context,
            max_calls_per_turn=asked.max_calls_per_turn or ours.max_calls_per_turn,
            max_consecutive_invalid_calls=asked.max_consecutive_invalid_calls or ours.max_consecutive_invalid_calls,
            max_calls=asked.max_calls or ours.max_calls,
            max_tokens_per_turn=ours.max_tokens_per_turn,
            min_turn_tokens=ours.min_turn_tokens,
            call_deadline_s=ours.call_deadline_s,
        )

    def _offer(self, start: pb.RunRequest.Start, catalogue: Mapping[str, tool_pb2.ToolSpec]) -> Offer:
        offered = {n for n, s in catalogue.items() if s.visibility in (0, tool_pb2.VISIBILITY_MODEL)}
        graders = {n for n, s in catalogue.items() if s.visibility == tool_pb2.VISIBILITY_GRADER}
        self._require(start.tools, offered, "tool")
        self._require([start.grader] if start.grader else [], graders, "grader")
        names = list(dict.fromkeys(start.tools))
        key = tuple((name, catalogue[name].version_hash or str(catalogue[name])) for name in names)
        offer = self._offers.get(key)
        if offer is None:
            offer = self._build_offer([catalogue[name] for name in names])
            self._offers[key] = offer
            if len(self._offers) > _MAX_OFFERS:
                self._offers.popitem(last=False)
        else:
            self._offers.move_to_end(key)
        return offer

    @staticmethod
    def _require(wanted: Sequence[str], served: set[str], what: str) -> None:
        missing = [name for name in wanted if name not in served]
        if missing:
            shown = ", ".join(sorted(served)[:_NAMES_SHOWN]) or "none"
            raise Refused(
                f"no gateway serves the {what} {missing[0]!r} that the task names; served now: {shown}",
                tools_missing=True,
            )

    @staticmethod
    def _build_offer(specs: Sequence[tool_pb2.ToolSpec]) -> Offer:
        definitions = tuple(
            ToolDefinition(spec.name, spec.description, spec.input_schema_json or b'{"type": "object"}')
            for spec in specs
        )
        try:
            tools = ToolSet({definition.name: definition for definition in definitions})
        except TurnFormatError as error:
            raise Refused(str(error)) from error
        declared = {s.name: max(s.max_timeout_ms, s.default_timeout_ms) / 1000 for s in specs}
        return Offer(tools, definitions, {name: seconds for name, seconds in declared.items() if seconds > 0})


def _messages(messages: Sequence[pb.ChatMessage]) -> list[Message]:
    read = []
    for index, message in enumerate(messages):
        texts = []
        for part in message.parts:
            if part.WhichOneof("body") != "text":
                raise Refused(f"message {index} has a part that is not text: this node renders text alone")
            texts.append(part.text)
        try:
            content = b"".join(texts).decode()
        except UnicodeDecodeError as error:
            raise Refused(f"message {index} is not UTF-8: {error.reason} at byte {error.start}") from error
        read.append(Message(message.role, content, message.name, message.tool_call_id))
    return read
