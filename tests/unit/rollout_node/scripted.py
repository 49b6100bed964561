"""A scripted engine and a scripted tool caller, and a node loop over them with a real turn format.

The engine samples texts from a script, token by token, each token when the test says so (or at once). The tool caller
answers when the test says so. Everything else (rendering, parsing, books, snapshots) is the real part.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fermata.v1 import gateway_pb2, tool_pb2
from fermata.v1 import rollout_pb2 as pb
from fermata.v1.weights_pb2 import WeightVersion

from node_runtime import outcomes
from node_runtime.spans import SpanWriter
from rollout_node.engine import Delta, EngineError, EngineStats, SamplingSpec
from rollout_node.loop import NodeLoop
from rollout_node.outbox import Outbox
from rollout_node.settings import RolloutSettings
from rollout_node.turn import TurnFormat
from tests.support.tiny_model import CHAT_TEMPLATE
from tests.support.tokenizers import byte_level
from tool_gateway.client import CallOptions, OnEvent, Result

TURNS = TurnFormat.from_template(byte_level(), CHAT_TEMPLATE, stop_tokens=["<|im_end|>"])
STOP = TURNS.stop_token_ids[0]
RUN = "run"
CALCULATOR = tool_pb2.ToolSpec(
    name="calculator",
    description="computes",
    input_schema_json=b'{"type":"object","properties":{"expression":{"type":"string"}},"required":["expression"]}',
    idempotent=True,
    visibility=tool_pb2.VISIBILITY_MODEL,
    version_hash="1",
)
JUDGE = tool_pb2.ToolSpec(
    name="judge",
    input_schema_json=b'{"type":"object"}',
    visibility=tool_pb2.VISIBILITY_GRADER,
    version_hash="1",
)


def sampled(text: str, *, stop: bool = True) -> list[int]:
    """Ids a model would sample for this text: control tokens as such, and the stop token at the end."""
    ids = byte_level().encode(text, add_special_tokens=False).ids
    return [*ids, STOP] if stop else ids


def call_text(expression: str = "1+1", tool: str = "calculator") -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


@dataclass
class Request:
    """One request the loop made, as the test sees it."""

    request_id: str
    prompt: list[int]
    sampling: SamplingSpec
    priority: int
    given: deque[int]
    out: list[int] = field(default_factory=list)  # sampled so far
    open: bool = True
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    error: EngineError | None = None
    reason: str | None = None

    @property
    def trajectory(self) -> str:
        return self.request_id.split("/")[1]

    def let(self, tokens: int = 1) -> None:
        """So many more tokens are sampled."""
        for _ in range(tokens):
            self.gate.release()

    def let_all(self) -> None:
        self.let(len(self.given) + 1)

    def fail(self, sentence: str) -> None:
        self.error = EngineError(sentence, tool_pb2.OUTCOME_INTERNAL, tool_pb2.FAULT_INFRA)
        self.gate.release()


class ScriptedEngine:
    """`script(trajectory id, turn)` gives the ids of a turn. `manual`: tokens come only when a test lets them."""

    def __init__(self, script: Callable[[str, int], Sequence[int]], *, manual: bool = False) -> None:
        self.script = script
        self.manual = manual
        self.chunk = 1  # tokens a delta
        self.version = WeightVersion(lineage="a", number=1)
        self.model_hash = "model"
        self.max_model_len = 4096
        self.kv_tokens = 0  # unknown: admission holds nobody back
        self.on_serving: list[Callable[[bool, str], None]] = []
        self.requests: list[Request] = []
        self._why_not = ""
        self.generated = 0

    @property
    def serving(self) -> bool:
        return not self._why_not

    @property
    def why_not(self) -> str:
        return self._why_not

    def set_serving(self, why_not: str = "") -> None:
        self._why_not = why_not
        for request in self.requests:
            if why_not and request.open:
                request.fail(why_not)
        for listener in self.on_serving:
            listener(not why_not, why_not)

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return ""

    @property
    def live(self) -> list[Request]:
        return [request for request in self.requests if request.open]

    def of(self, trajectory: str) -> Request:
        return [request for request in self.requests if request.trajectory == trajectory][-1]

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingSpec, priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        _, trajectory, _, turn = request_id.split("/")
        script = deque(self.script(trajectory, int(turn)))
        request = Request(request_id, list(prompt_ids), sampling, priority, script)
        self.requests.append(request)
        try:
            count = 0
            while True:
                if self.manual:
                    await request.gate.acquire()
                else:
                    await asyncio.sleep(0)
                if request.error is not None:
                    raise request.error
                if request.reason is not None:
                    yield Delta((), (), request.reason, False, self.version)
                    return
                tokens = [script.popleft() for _ in range(min(self.chunk, len(script), sampling.max_tokens - count))]
                count += len(tokens)
                request.out.extend(tokens)
                self.generated += len(tokens)
                stopped = tokens[-1] == STOP
                reason = "stop" if stopped else "length" if count >= sampling.max_tokens or not script else None
                version = WeightVersion.FromString(self.version.SerializeToString())
                yield Delta(tokens, [-0.25] * len(tokens), reason, stopped, version)
                if reason:
                    return
        finally:
            request.open = False

    def stats(self) -> EngineStats:
        return EngineStats(0.0, len(self.live), 0, self.generated)


@dataclass
class Pending:
    """One call as the caller sees it."""

    key: str
    tool: str
    args_json: bytes
    deadline_s: float
    options: CallOptions
    on_event: OnEvent | None
    future: asyncio.Future[Result]

    def started(self, instance_id: str = "backend-1", attempt: int = 1) -> None:
        assert self.on_event is not None
        self.on_event(gateway_pb2.ServerFrame.Started(key=self.key, attempt=attempt, instance_id=instance_id))

    def answer(self, text: str = "2", outcome: int = tool_pb2.OUTCOME_OK, fault: int = 0, detail: str = "") -> None:
        if not self.future.done():
            final = outcomes.make_final(outcome, text=text, fault=fault, detail=detail)
            self.future.set_result(Result(self.key, self.tool, final, attempts=1, run_us=5))


class ScriptedTools:
    """Records what was asked; `auto` answers at once."""

    def __init__(self, *, auto: bool = False, tools: Iterable[tool_pb2.ToolSpec] = (CALCULATOR, JUDGE)) -> None:
        self.auto = auto
        self.catalogue: Mapping[str, tool_pb2.ToolSpec] = {tool.name: tool for tool in tools}
        self.connected = True
        self.calls: list[Pending] = []
        self.cancelled: list[str] = []
        self.released: list[str] = []
        self.released_trajectories: list[tuple[str, int]] = []
        self.fenced: list[tuple[str, int, tuple[str, ...]]] = []

    @property
    def pending(self) -> list[Pending]:
        return [call for call in self.calls if not call.future.done()]

    def of(self, key: str) -> Pending:
        return next(call for call in reversed(self.calls) if call.key == key)

    async def call(
        self,
        *,
        key: str,
        tool: str,
        args_json: bytes,
        deadline_s: float,
        on_event: OnEvent | None = None,
        options: CallOptions | None = None,
    ) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        call = Pending(key, tool, args_json, deadline_s, options or CallOptions(), on_event, future)
        self.calls.append(call)
        if self.auto:
            call.answer()
        return await future

    def cancel(self, key: str, reason: str = "") -> None:
        self.cancelled.append(key)
        for call in self.pending:
            if call.key == key:
                call.answer("", tool_pb2.OUTCOME_CANCELLED)

    def release(self, keys: Iterable[str]) -> None:
        self.released.extend(keys)

    def release_trajectory(self, trajectory_id: str, generation: int) -> None:
        self.released_trajectories.append((trajectory_id, generation))

    def fence(self, trajectory_id: str, generation: int, keep_keys: Iterable[str] = ()) -> None:
        self.fenced.append((trajectory_id, generation, tuple(keep_keys)))


class Node:
    """A node loop over scripted parts, running, with the trainer's side of the outbox."""

    def __init__(self, engine: ScriptedEngine, tools: ScriptedTools, **settings: object) -> None:
        self.engine = engine
        self.tools = tools
        self.settings = RolloutSettings.model_validate({"model": "m", **settings})
        self.loop = NodeLoop(self.settings, engine, TURNS, Outbox(64), SpanWriter(None, "test"))
        self.loop.desk.use(RUN, tools)
        self.loop.new_stream(RUN, same_trainer=False)
        self.events: list[pb.RunResponse.Event] = []

    async def __aenter__(self) -> Node:
        self._running = asyncio.create_task(self.loop.run())
        await settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        assert not self.engine.live, "the loop left requests in the engine"

    def start(self, trajectory: str = "t", **fields: object) -> None:
        self.loop.take_in(start(trajectory, **fields))

    async def next(self, kind: str) -> pb.RunResponse.Event:
        """The next event of this kind; others before it are kept in `events`."""
        while True:
            for event in self.events:
                if event.HasField(kind):
                    self.events.remove(event)
                    return event
            async with asyncio.timeout(5):
                self.events.extend(await self.loop.outbox.take(1 << 20))

    async def collect(self) -> list[pb.RunResponse.Event]:
        """Everything said so far, once nothing moves any more."""
        await settle()
        if len(self.loop.outbox):
            self.events.extend(await self.loop.outbox.take(1 << 30))
        events, self.events = self.events, []
        return events

    def ack(self, event: object, *, stored: bool = True) -> None:
        self.loop.acknowledge(
            pb.RunRequest.AckSnapshot(
                trajectory_id=event.trajectory_id,
                generation=event.generation,
                snapshot_seq=event.snapshot.snapshot_seq if hasattr(event, "snapshot") else 0,
                stored=stored,
            )
        )


def start(trajectory: str = "t", **fields: object) -> pb.RunRequest.Start:
    values: dict[str, object] = {"run_id": RUN, "order": 1, "tools": ["calculator"], **fields}
    message = pb.RunRequest.Start(trajectory_id=trajectory, **values)
    if not message.messages:
        message.messages.add(role="user", parts=[tool_pb2.ContentPart(text=b"What is 1+1?")])
    return message


async def settle(rounds: int = 400) -> None:
    """Let everything that is ready run: the scripted parts wait for nothing but the test."""
    for _ in range(rounds):
        await asyncio.sleep(0)


def one_call_then(answer: str = "It is 2.", calls: int = 1) -> Callable[[str, int], list[int]]:
    """A first turn with so many calls, then this answer."""

    def script(_trajectory: str, turn: int) -> list[int]:
        return sampled("".join(call_text(f"{i}+1") for i in range(calls)) if turn == 0 else answer)

    return script


def resume(node: Node, snapshot: pb.Snapshot, generation: int = 1, held_ms: int = 500) -> None:
    """A trainer gives this node a trajectory of another's."""
    request = pb.RunRequest.Resume(start=start(generation=generation), snapshot=snapshot, held_ms=held_ms)
    node.loop.take_in(request)
