from fermata.v1 import tool_pb2 as _tool_pb2
from fermata.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_SUSPEND: _ClassVar[Mode]
    MODE_BOUNDARY: _ClassVar[Mode]
    MODE_INTERRUPT: _ClassVar[Mode]

class SegmentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEGMENT_KIND_UNSPECIFIED: _ClassVar[SegmentKind]
    SEGMENT_KIND_PROMPT: _ClassVar[SegmentKind]
    SEGMENT_KIND_MODEL: _ClassVar[SegmentKind]
    SEGMENT_KIND_TOOL: _ClassVar[SegmentKind]
    SEGMENT_KIND_INJECTED: _ClassVar[SegmentKind]

class KvMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_MODE_UNSPECIFIED: _ClassVar[KvMode]
    KV_MODE_RECOMPUTED: _ClassVar[KvMode]
    KV_MODE_KEPT: _ClassVar[KvMode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_MAX_TURNS: _ClassVar[FinishReason]
    FINISH_REASON_INVALID_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_MAX_CALLS: _ClassVar[FinishReason]
MODE_UNSPECIFIED: Mode
MODE_SUSPEND: Mode
MODE_BOUNDARY: Mode
MODE_INTERRUPT: Mode
SEGMENT_KIND_UNSPECIFIED: SegmentKind
SEGMENT_KIND_PROMPT: SegmentKind
SEGMENT_KIND_MODEL: SegmentKind
SEGMENT_KIND_TOOL: SegmentKind
SEGMENT_KIND_INJECTED: SegmentKind
KV_MODE_UNSPECIFIED: KvMode
KV_MODE_RECOMPUTED: KvMode
KV_MODE_KEPT: KvMode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_MAX_TURNS: FinishReason
FINISH_REASON_INVALID_CALLS: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_MAX_CALLS: FinishReason

class RunRequest(_message.Message):
    __slots__ = ("events",)
    class Event(_message.Message):
        __slots__ = ("hello", "start", "resume", "cancel", "ack_snapshot", "drain")
        HELLO_FIELD_NUMBER: _ClassVar[int]
        START_FIELD_NUMBER: _ClassVar[int]
        RESUME_FIELD_NUMBER: _ClassVar[int]
        CANCEL_FIELD_NUMBER: _ClassVar[int]
        ACK_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
        DRAIN_FIELD_NUMBER: _ClassVar[int]
        hello: RunRequest.Hello
        start: RunRequest.Start
        resume: RunRequest.Resume
        cancel: RunRequest.Cancel
        ack_snapshot: RunRequest.AckSnapshot
        drain: RunRequest.Drain
        def __init__(self, hello: _Optional[_Union[RunRequest.Hello, _Mapping]] = ..., start: _Optional[_Union[RunRequest.Start, _Mapping]] = ..., resume: _Optional[_Union[RunRequest.Resume, _Mapping]] = ..., cancel: _Optional[_Union[RunRequest.Cancel, _Mapping]] = ..., ack_snapshot: _Optional[_Union[RunRequest.AckSnapshot, _Mapping]] = ..., drain: _Optional[_Union[RunRequest.Drain, _Mapping]] = ...) -> None: ...
    class Hello(_message.Message):
        __slots__ = ("protocol_minor", "features", "run_id", "trainer_id", "epoch")
        PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
        FEATURES_FIELD_NUMBER: _ClassVar[int]
        RUN_ID_FIELD_NUMBER: _ClassVar[int]
        TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        protocol_minor: int
        features: _containers.RepeatedScalarFieldContainer[str]
        run_id: str
        trainer_id: str
        epoch: int
        def __init__(self, protocol_minor: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., run_id: _Optional[str] = ..., trainer_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
    class Start(_message.Message):
        __slots__ = ("run_id", "trajectory_id", "generation", "order", "model_id", "adapter_id", "min_weight_version", "sampling", "mode", "tools", "grader", "limits", "deadline_ms", "group_id", "eval", "messages", "context", "tenant", "traceparent")
        class ContextEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        RUN_ID_FIELD_NUMBER: _ClassVar[int]
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        ORDER_FIELD_NUMBER: _ClassVar[int]
        MODEL_ID_FIELD_NUMBER: _ClassVar[int]
        ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
        MIN_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
        SAMPLING_FIELD_NUMBER: _ClassVar[int]
        MODE_FIELD_NUMBER: _ClassVar[int]
        TOOLS_FIELD_NUMBER: _ClassVar[int]
        GRADER_FIELD_NUMBER: _ClassVar[int]
        LIMITS_FIELD_NUMBER: _ClassVar[int]
        DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
        GROUP_ID_FIELD_NUMBER: _ClassVar[int]
        EVAL_FIELD_NUMBER: _ClassVar[int]
        MESSAGES_FIELD_NUMBER: _ClassVar[int]
        CONTEXT_FIELD_NUMBER: _ClassVar[int]
        TENANT_FIELD_NUMBER: _ClassVar[int]
        TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
        run_id: str
        trajectory_id: str
        generation: int
        order: int
        model_id: str
        adapter_id: str
        min_weight_version: _weights_pb2.WeightVersion
        sampling: Sampling
        mode: Mode
        tools: _containers.RepeatedScalarFieldContainer[str]
        grader: str
        limits: Limits
        deadline_ms: int
        group_id: str
        eval: bool
        messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
        context: _containers.ScalarMap[str, str]
        tenant: str
        traceparent: str
        def __init__(self, run_id: _Optional[str] = ..., trajectory_id: _Optional[str] = ..., generation: _Optional[int] = ..., order: _Optional[int] = ..., model_id: _Optional[str] = ..., adapter_id: _Optional[str] = ..., min_weight_version: _Optional[_Union[_weights_pb2.WeightVersion, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., mode: _Optional[_Union[Mode, str]] = ..., tools: _Optional[_Iterable[str]] = ..., grader: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., group_id: _Optional[str] = ..., eval: bool = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., context: _Optional[_Mapping[str, str]] = ..., tenant: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...
    class Resume(_message.Message):
        __slots__ = ("start", "snapshot", "held_ms")
        START_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
        HELD_MS_FIELD_NUMBER: _ClassVar[int]
        start: RunRequest.Start
        snapshot: Snapshot
        held_ms: int
        def __init__(self, start: _Optional[_Union[RunRequest.Start, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., held_ms: _Optional[int] = ...) -> None: ...
    class Cancel(_message.Message):
        __slots__ = ("trajectory_id", "reason")
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        trajectory_id: str
        reason: str
        def __init__(self, trajectory_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
    class AckSnapshot(_message.Message):
        __slots__ = ("trajectory_id", "generation", "snapshot_seq", "stored")
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_SEQ_FIELD_NUMBER: _ClassVar[int]
        STORED_FIELD_NUMBER: _ClassVar[int]
        trajectory_id: str
        generation: int
        snapshot_seq: int
        stored: bool
        def __init__(self, trajectory_id: _Optional[str] = ..., generation: _Optional[int] = ..., snapshot_seq: _Optional[int] = ..., stored: bool = ...) -> None: ...
    class Drain(_message.Message):
        __slots__ = ("deadline_ms",)
        DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
        deadline_ms: int
        def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RunRequest.Event]
    def __init__(self, events: _Optional[_Iterable[_Union[RunRequest.Event, _Mapping]]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens_per_turn", "stop", "logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_TURN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens_per_turn: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    logprobs: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens_per_turn: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., logprobs: bool = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_turns", "max_context_tokens", "max_calls_per_turn", "max_consecutive_invalid_calls", "max_calls")
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CALLS_PER_TURN_FIELD_NUMBER: _ClassVar[int]
    MAX_CONSECUTIVE_INVALID_CALLS_FIELD_NUMBER: _ClassVar[int]
    MAX_CALLS_FIELD_NUMBER: _ClassVar[int]
    max_turns: int
    max_context_tokens: int
    max_calls_per_turn: int
    max_consecutive_invalid_calls: int
    max_calls: int
    def __init__(self, max_turns: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_calls_per_turn: _Optional[int] = ..., max_consecutive_invalid_calls: _Optional[int] = ..., max_calls: _Optional[int] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "parts", "name", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    parts: _containers.RepeatedCompositeFieldContainer[_tool_pb2.ContentPart]
    name: str
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[_tool_pb2.ContentPart, _Mapping]]] = ..., name: _Optional[str] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("kind", "token_ids", "logprobs", "loss_mask", "versions", "turn", "call_key", "kv_mode")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    CALL_KEY_FIELD_NUMBER: _ClassVar[int]
    KV_MODE_FIELD_NUMBER: _ClassVar[int]
    kind: SegmentKind
    token_ids: bytes
    logprobs: bytes
    loss_mask: bytes
    versions: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    turn: int
    call_key: str
    kv_mode: KvMode
    def __init__(self, kind: _Optional[_Union[SegmentKind, str]] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., versions: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., turn: _Optional[int] = ..., call_key: _Optional[str] = ..., kv_mode: _Optional[_Union[KvMode, str]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: _weights_pb2.WeightVersion
    tokens: int
    def __init__(self, version: _Optional[_Union[_weights_pb2.WeightVersion, _Mapping]] = ..., tokens: _Optional[int] = ...) -> None: ...

class PendingCall(_message.Message):
    __slots__ = ("key", "call_id", "tool", "args_json", "args_sha256", "remaining_ms", "instance_id", "result", "ordinal", "last_attempt", "age_ms")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    ARGS_SHA256_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    LAST_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    key: str
    call_id: str
    tool: str
    args_json: bytes
    args_sha256: bytes
    remaining_ms: int
    instance_id: str
    result: _tool_pb2.Final
    ordinal: int
    last_attempt: int
    age_ms: int
    def __init__(self, key: _Optional[str] = ..., call_id: _Optional[str] = ..., tool: _Optional[str] = ..., args_json: _Optional[bytes] = ..., args_sha256: _Optional[bytes] = ..., remaining_ms: _Optional[int] = ..., instance_id: _Optional[str] = ..., result: _Optional[_Union[_tool_pb2.Final, _Mapping]] = ..., ordinal: _Optional[int] = ..., last_attempt: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("snapshot_seq", "base_snapshot_seq", "base_tokens", "base_segments", "segments", "model_hash", "tokenizer_hash", "template_hash", "turn", "consecutive_invalid_calls", "calls", "remaining_ms", "pending", "total_tokens")
    SNAPSHOT_SEQ_FIELD_NUMBER: _ClassVar[int]
    BASE_SNAPSHOT_SEQ_FIELD_NUMBER: _ClassVar[int]
    BASE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BASE_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_HASH_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    CONSECUTIVE_INVALID_CALLS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    snapshot_seq: int
    base_snapshot_seq: int
    base_tokens: int
    base_segments: int
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    model_hash: str
    tokenizer_hash: str
    template_hash: str
    turn: int
    consecutive_invalid_calls: int
    calls: int
    remaining_ms: int
    pending: _containers.RepeatedCompositeFieldContainer[PendingCall]
    total_tokens: int
    def __init__(self, snapshot_seq: _Optional[int] = ..., base_snapshot_seq: _Optional[int] = ..., base_tokens: _Optional[int] = ..., base_segments: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., model_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., template_hash: _Optional[str] = ..., turn: _Optional[int] = ..., consecutive_invalid_calls: _Optional[int] = ..., calls: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., pending: _Optional[_Iterable[_Union[PendingCall, _Mapping]]] = ..., total_tokens: _Optional[int] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("events",)
    class Event(_message.Message):
        __slots__ = ("welcome", "accepted", "rejected", "parked", "finished", "failed", "handed_over", "load")
        WELCOME_FIELD_NUMBER: _ClassVar[int]
        ACCEPTED_FIELD_NUMBER: _ClassVar[int]
        REJECTED_FIELD_NUMBER: _ClassVar[int]
        PARKED_FIELD_NUMBER: _ClassVar[int]
        FINISHED_FIELD_NUMBER: _ClassVar[int]
        FAILED_FIELD_NUMBER: _ClassVar[int]
        HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
        LOAD_FIELD_NUMBER: _ClassVar[int]
        welcome: RunResponse.Welcome
        accepted: RunResponse.Accepted
        rejected: RunResponse.Rejected
        parked: RunResponse.Parked
        finished: RunResponse.Finished
        failed: RunResponse.Failed
        handed_over: RunResponse.HandedOver
        load: RunResponse.Load
        def __init__(self, welcome: _Optional[_Union[RunResponse.Welcome, _Mapping]] = ..., accepted: _Optional[_Union[RunResponse.Accepted, _Mapping]] = ..., rejected: _Optional[_Union[RunResponse.Rejected, _Mapping]] = ..., parked: _Optional[_Union[RunResponse.Parked, _Mapping]] = ..., finished: _Optional[_Union[RunResponse.Finished, _Mapping]] = ..., failed: _Optional[_Union[RunResponse.Failed, _Mapping]] = ..., handed_over: _Optional[_Union[RunResponse.HandedOver, _Mapping]] = ..., load: _Optional[_Union[RunResponse.Load, _Mapping]] = ...) -> None: ...
    class Welcome(_message.Message):
        __slots__ = ("protocol_minor", "features", "node_id", "incarnation", "model_id", "model_hash", "tokenizer_hash", "template_hash", "load", "max_trajectories", "tools")
        PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
        FEATURES_FIELD_NUMBER: _ClassVar[int]
        NODE_ID_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        MODEL_ID_FIELD_NUMBER: _ClassVar[int]
        MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
        TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
        TEMPLATE_HASH_FIELD_NUMBER: _ClassVar[int]
        LOAD_FIELD_NUMBER: _ClassVar[int]
        MAX_TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
        TOOLS_FIELD_NUMBER: _ClassVar[int]
        protocol_minor: int
        features: _containers.RepeatedScalarFieldContainer[str]
        node_id: str
        incarnation: str
        model_id: str
        model_hash: str
        tokenizer_hash: str
        template_hash: str
        load: RunResponse.Load
        max_trajectories: int
        tools: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, protocol_minor: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model_id: _Optional[str] = ..., model_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., template_hash: _Optional[str] = ..., load: _Optional[_Union[RunResponse.Load, _Mapping]] = ..., max_trajectories: _Optional[int] = ..., tools: _Optional[_Iterable[str]] = ...) -> None: ...
    class Accepted(_message.Message):
        __slots__ = ("trajectory_id", "generation")
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        trajectory_id: str
        generation: int
        def __init__(self, trajectory_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...
    class Rejected(_message.Message):
        __slots__ = ("trajectory_id", "generation", "reason", "retry_after_ms")
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
        trajectory_id: str
        generation: int
        reason: str
        retry_after_ms: int
        def __init__(self, trajectory_id: _Optional[str] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...
    class Parked(_message.Message):
        __slots__ = ("trajectory_id", "generation", "snapshot")
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
        trajectory_id: str
        generation: int
        snapshot: Snapshot
        def __init__(self, trajectory_id: _Optional[str] = ..., generation: _Optional[int] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ...) -> None: ...
    class Finished(_message.Message):
        __slots__ = ("trajectory_id", "generation", "snapshot", "reason", "answer", "calls", "generate_us", "tool_wait_us", "queue_us", "grade")
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        ANSWER_FIELD_NUMBER: _ClassVar[int]
        CALLS_FIELD_NUMBER: _ClassVar[int]
        GENERATE_US_FIELD_NUMBER: _ClassVar[int]
        TOOL_WAIT_US_FIELD_NUMBER: _ClassVar[int]
        QUEUE_US_FIELD_NUMBER: _ClassVar[int]
        GRADE_FIELD_NUMBER: _ClassVar[int]
        trajectory_id: str
        generation: int
        snapshot: Snapshot
        reason: FinishReason
        answer: bytes
        calls: _containers.RepeatedCompositeFieldContainer[CallSummary]
        generate_us: int
        tool_wait_us: int
        queue_us: int
        grade: _tool_pb2.Final
        def __init__(self, trajectory_id: _Optional[str] = ..., generation: _Optional[int] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., answer: _Optional[bytes] = ..., calls: _Optional[_Iterable[_Union[CallSummary, _Mapping]]] = ..., generate_us: _Optional[int] = ..., tool_wait_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., grade: _Optional[_Union[_tool_pb2.Final, _Mapping]] = ...) -> None: ...
    class Failed(_message.Message):
        __slots__ = ("trajectory_id", "generation", "fault", "outcome", "reason", "tool", "calls")
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        FAULT_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        TOOL_FIELD_NUMBER: _ClassVar[int]
        CALLS_FIELD_NUMBER: _ClassVar[int]
        trajectory_id: str
        generation: int
        fault: _tool_pb2.Fault
        outcome: _tool_pb2.Outcome
        reason: str
        tool: str
        calls: _containers.RepeatedCompositeFieldContainer[CallSummary]
        def __init__(self, trajectory_id: _Optional[str] = ..., generation: _Optional[int] = ..., fault: _Optional[_Union[_tool_pb2.Fault, str]] = ..., outcome: _Optional[_Union[_tool_pb2.Outcome, str]] = ..., reason: _Optional[str] = ..., tool: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[CallSummary, _Mapping]]] = ...) -> None: ...
    class HandedOver(_message.Message):
        __slots__ = ("trajectory_id", "generation", "snapshot")
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
        trajectory_id: str
        generation: int
        snapshot: Snapshot
        def __init__(self, trajectory_id: _Optional[str] = ..., generation: _Optional[int] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ...) -> None: ...
    class Load(_message.Message):
        __slots__ = ("kv_used", "live", "parked", "queued", "versions", "generated_tokens", "draining", "serving", "detail")
        KV_USED_FIELD_NUMBER: _ClassVar[int]
        LIVE_FIELD_NUMBER: _ClassVar[int]
        PARKED_FIELD_NUMBER: _ClassVar[int]
        QUEUED_FIELD_NUMBER: _ClassVar[int]
        VERSIONS_FIELD_NUMBER: _ClassVar[int]
        GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        DRAINING_FIELD_NUMBER: _ClassVar[int]
        SERVING_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        kv_used: float
        live: int
        parked: int
        queued: int
        versions: _containers.RepeatedCompositeFieldContainer[_weights_pb2.WeightVersion]
        generated_tokens: int
        draining: bool
        serving: bool
        detail: str
        def __init__(self, kv_used: _Optional[float] = ..., live: _Optional[int] = ..., parked: _Optional[int] = ..., queued: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[_weights_pb2.WeightVersion, _Mapping]]] = ..., generated_tokens: _Optional[int] = ..., draining: bool = ..., serving: bool = ..., detail: _Optional[str] = ...) -> None: ...
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RunResponse.Event]
    def __init__(self, events: _Optional[_Iterable[_Union[RunResponse.Event, _Mapping]]] = ...) -> None: ...

class CallSummary(_message.Message):
    __slots__ = ("key", "tool", "outcome", "fault", "attempts", "wait_us", "run_us")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    RUN_US_FIELD_NUMBER: _ClassVar[int]
    key: str
    tool: str
    outcome: _tool_pb2.Outcome
    fault: _tool_pb2.Fault
    attempts: int
    wait_us: int
    run_us: int
    def __init__(self, key: _Optional[str] = ..., tool: _Optional[str] = ..., outcome: _Optional[_Union[_tool_pb2.Outcome, str]] = ..., fault: _Optional[_Union[_tool_pb2.Fault, str]] = ..., attempts: _Optional[int] = ..., wait_us: _Optional[int] = ..., run_us: _Optional[int] = ...) -> None: ...
