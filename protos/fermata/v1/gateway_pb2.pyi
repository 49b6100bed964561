from fermata.v1 import tool_pb2 as _tool_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientFrame(_message.Message):
    __slots__ = ("events",)
    class Event(_message.Message):
        __slots__ = ("hello", "call_start", "cancel", "result_ack", "release", "fence_trajectory", "window", "ping", "goodbye")
        HELLO_FIELD_NUMBER: _ClassVar[int]
        CALL_START_FIELD_NUMBER: _ClassVar[int]
        CANCEL_FIELD_NUMBER: _ClassVar[int]
        RESULT_ACK_FIELD_NUMBER: _ClassVar[int]
        RELEASE_FIELD_NUMBER: _ClassVar[int]
        FENCE_TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
        WINDOW_FIELD_NUMBER: _ClassVar[int]
        PING_FIELD_NUMBER: _ClassVar[int]
        GOODBYE_FIELD_NUMBER: _ClassVar[int]
        hello: ClientFrame.Hello
        call_start: ClientFrame.CallStart
        cancel: ClientFrame.Cancel
        result_ack: ClientFrame.ResultAck
        release: ClientFrame.Release
        fence_trajectory: ClientFrame.FenceTrajectory
        window: ClientFrame.Window
        ping: ClientFrame.Ping
        goodbye: ClientFrame.Goodbye
        def __init__(self, hello: _Optional[_Union[ClientFrame.Hello, _Mapping]] = ..., call_start: _Optional[_Union[ClientFrame.CallStart, _Mapping]] = ..., cancel: _Optional[_Union[ClientFrame.Cancel, _Mapping]] = ..., result_ack: _Optional[_Union[ClientFrame.ResultAck, _Mapping]] = ..., release: _Optional[_Union[ClientFrame.Release, _Mapping]] = ..., fence_trajectory: _Optional[_Union[ClientFrame.FenceTrajectory, _Mapping]] = ..., window: _Optional[_Union[ClientFrame.Window, _Mapping]] = ..., ping: _Optional[_Union[ClientFrame.Ping, _Mapping]] = ..., goodbye: _Optional[_Union[ClientFrame.Goodbye, _Mapping]] = ...) -> None: ...
    class Hello(_message.Message):
        __slots__ = ("protocol_minor", "features", "run_id", "node_id", "tenant", "session_id", "epoch", "resume_from_seq", "max_frame_bytes", "incarnation", "window_bytes")
        PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
        FEATURES_FIELD_NUMBER: _ClassVar[int]
        RUN_ID_FIELD_NUMBER: _ClassVar[int]
        NODE_ID_FIELD_NUMBER: _ClassVar[int]
        TENANT_FIELD_NUMBER: _ClassVar[int]
        SESSION_ID_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        RESUME_FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
        MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
        protocol_minor: int
        features: _containers.RepeatedScalarFieldContainer[str]
        run_id: str
        node_id: str
        tenant: str
        session_id: str
        epoch: int
        resume_from_seq: int
        max_frame_bytes: int
        incarnation: str
        window_bytes: int
        def __init__(self, protocol_minor: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., run_id: _Optional[str] = ..., node_id: _Optional[str] = ..., tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., resume_from_seq: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., incarnation: _Optional[str] = ..., window_bytes: _Optional[int] = ...) -> None: ...
    class CallStart(_message.Message):
        __slots__ = ("key", "call_id", "trajectory_id", "generation", "mode", "last_instance_id", "resend", "tool", "args_json", "args_sha256", "session", "queue_timeout_ms", "attempt_timeout_ms", "total_timeout_ms", "heartbeat_timeout_ms", "weight_version", "group_id", "cache_scope", "priority", "traceparent", "age_ms", "last_attempt", "context", "max_output_bytes", "grader")
        class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
            __slots__ = ()
            MODE_UNSPECIFIED: _ClassVar[ClientFrame.CallStart.Mode]
            MODE_START_OR_JOIN: _ClassVar[ClientFrame.CallStart.Mode]
            MODE_JOIN_ONLY: _ClassVar[ClientFrame.CallStart.Mode]
        MODE_UNSPECIFIED: ClientFrame.CallStart.Mode
        MODE_START_OR_JOIN: ClientFrame.CallStart.Mode
        MODE_JOIN_ONLY: ClientFrame.CallStart.Mode
        class ContextEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        KEY_FIELD_NUMBER: _ClassVar[int]
        CALL_ID_FIELD_NUMBER: _ClassVar[int]
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        MODE_FIELD_NUMBER: _ClassVar[int]
        LAST_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        RESEND_FIELD_NUMBER: _ClassVar[int]
        TOOL_FIELD_NUMBER: _ClassVar[int]
        ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
        ARGS_SHA256_FIELD_NUMBER: _ClassVar[int]
        SESSION_FIELD_NUMBER: _ClassVar[int]
        QUEUE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
        TOTAL_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
        HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
        WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
        GROUP_ID_FIELD_NUMBER: _ClassVar[int]
        CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
        PRIORITY_FIELD_NUMBER: _ClassVar[int]
        TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
        AGE_MS_FIELD_NUMBER: _ClassVar[int]
        LAST_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        CONTEXT_FIELD_NUMBER: _ClassVar[int]
        MAX_OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
        GRADER_FIELD_NUMBER: _ClassVar[int]
        key: str
        call_id: str
        trajectory_id: str
        generation: int
        mode: ClientFrame.CallStart.Mode
        last_instance_id: str
        resend: bool
        tool: str
        args_json: bytes
        args_sha256: bytes
        session: _tool_pb2.SessionRef
        queue_timeout_ms: int
        attempt_timeout_ms: int
        total_timeout_ms: int
        heartbeat_timeout_ms: int
        weight_version: int
        group_id: str
        cache_scope: str
        priority: int
        traceparent: str
        age_ms: int
        last_attempt: int
        context: _containers.ScalarMap[str, str]
        max_output_bytes: int
        grader: bool
        def __init__(self, key: _Optional[str] = ..., call_id: _Optional[str] = ..., trajectory_id: _Optional[str] = ..., generation: _Optional[int] = ..., mode: _Optional[_Union[ClientFrame.CallStart.Mode, str]] = ..., last_instance_id: _Optional[str] = ..., resend: bool = ..., tool: _Optional[str] = ..., args_json: _Optional[bytes] = ..., args_sha256: _Optional[bytes] = ..., session: _Optional[_Union[_tool_pb2.SessionRef, _Mapping]] = ..., queue_timeout_ms: _Optional[int] = ..., attempt_timeout_ms: _Optional[int] = ..., total_timeout_ms: _Optional[int] = ..., heartbeat_timeout_ms: _Optional[int] = ..., weight_version: _Optional[int] = ..., group_id: _Optional[str] = ..., cache_scope: _Optional[str] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ..., age_ms: _Optional[int] = ..., last_attempt: _Optional[int] = ..., context: _Optional[_Mapping[str, str]] = ..., max_output_bytes: _Optional[int] = ..., grader: bool = ...) -> None: ...
    class Cancel(_message.Message):
        __slots__ = ("key", "reason")
        KEY_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        key: str
        reason: str
        def __init__(self, key: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
    class ResultAck(_message.Message):
        __slots__ = ("seq",)
        SEQ_FIELD_NUMBER: _ClassVar[int]
        seq: int
        def __init__(self, seq: _Optional[int] = ...) -> None: ...
    class Release(_message.Message):
        __slots__ = ("keys", "trajectory_id", "generation")
        KEYS_FIELD_NUMBER: _ClassVar[int]
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        keys: _containers.RepeatedScalarFieldContainer[str]
        trajectory_id: str
        generation: int
        def __init__(self, keys: _Optional[_Iterable[str]] = ..., trajectory_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...
    class FenceTrajectory(_message.Message):
        __slots__ = ("run_id", "trajectory_id", "generation", "keep_keys")
        RUN_ID_FIELD_NUMBER: _ClassVar[int]
        TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
        GENERATION_FIELD_NUMBER: _ClassVar[int]
        KEEP_KEYS_FIELD_NUMBER: _ClassVar[int]
        run_id: str
        trajectory_id: str
        generation: int
        keep_keys: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, run_id: _Optional[str] = ..., trajectory_id: _Optional[str] = ..., generation: _Optional[int] = ..., keep_keys: _Optional[_Iterable[str]] = ...) -> None: ...
    class Window(_message.Message):
        __slots__ = ("add_bytes",)
        ADD_BYTES_FIELD_NUMBER: _ClassVar[int]
        add_bytes: int
        def __init__(self, add_bytes: _Optional[int] = ...) -> None: ...
    class Ping(_message.Message):
        __slots__ = ("nonce",)
        NONCE_FIELD_NUMBER: _ClassVar[int]
        nonce: int
        def __init__(self, nonce: _Optional[int] = ...) -> None: ...
    class Goodbye(_message.Message):
        __slots__ = ("reason", "final")
        REASON_FIELD_NUMBER: _ClassVar[int]
        FINAL_FIELD_NUMBER: _ClassVar[int]
        reason: str
        final: bool
        def __init__(self, reason: _Optional[str] = ..., final: bool = ...) -> None: ...
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[ClientFrame.Event]
    def __init__(self, events: _Optional[_Iterable[_Union[ClientFrame.Event, _Mapping]]] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("events",)
    class Event(_message.Message):
        __slots__ = ("welcome", "accepted", "started", "progress", "chunk", "result", "catalogue", "drain", "pong", "goodbye")
        WELCOME_FIELD_NUMBER: _ClassVar[int]
        ACCEPTED_FIELD_NUMBER: _ClassVar[int]
        STARTED_FIELD_NUMBER: _ClassVar[int]
        PROGRESS_FIELD_NUMBER: _ClassVar[int]
        CHUNK_FIELD_NUMBER: _ClassVar[int]
        RESULT_FIELD_NUMBER: _ClassVar[int]
        CATALOGUE_FIELD_NUMBER: _ClassVar[int]
        DRAIN_FIELD_NUMBER: _ClassVar[int]
        PONG_FIELD_NUMBER: _ClassVar[int]
        GOODBYE_FIELD_NUMBER: _ClassVar[int]
        welcome: ServerFrame.Welcome
        accepted: ServerFrame.Accepted
        started: ServerFrame.Started
        progress: ServerFrame.Progress
        chunk: ServerFrame.Chunk
        result: ServerFrame.Result
        catalogue: ServerFrame.Catalogue
        drain: ServerFrame.Drain
        pong: ServerFrame.Pong
        goodbye: ServerFrame.Goodbye
        def __init__(self, welcome: _Optional[_Union[ServerFrame.Welcome, _Mapping]] = ..., accepted: _Optional[_Union[ServerFrame.Accepted, _Mapping]] = ..., started: _Optional[_Union[ServerFrame.Started, _Mapping]] = ..., progress: _Optional[_Union[ServerFrame.Progress, _Mapping]] = ..., chunk: _Optional[_Union[ServerFrame.Chunk, _Mapping]] = ..., result: _Optional[_Union[ServerFrame.Result, _Mapping]] = ..., catalogue: _Optional[_Union[ServerFrame.Catalogue, _Mapping]] = ..., drain: _Optional[_Union[ServerFrame.Drain, _Mapping]] = ..., pong: _Optional[_Union[ServerFrame.Pong, _Mapping]] = ..., goodbye: _Optional[_Union[ServerFrame.Goodbye, _Mapping]] = ...) -> None: ...
    class Welcome(_message.Message):
        __slots__ = ("protocol_minor", "features", "gateway_id", "incarnation", "resumed", "known_calls", "credits", "heartbeat_interval_ms", "resume_window_ms", "max_frame_bytes", "durability", "known_calls_truncated")
        PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
        FEATURES_FIELD_NUMBER: _ClassVar[int]
        GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        RESUMED_FIELD_NUMBER: _ClassVar[int]
        KNOWN_CALLS_FIELD_NUMBER: _ClassVar[int]
        CREDITS_FIELD_NUMBER: _ClassVar[int]
        HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
        RESUME_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
        MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
        DURABILITY_FIELD_NUMBER: _ClassVar[int]
        KNOWN_CALLS_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
        protocol_minor: int
        features: _containers.RepeatedScalarFieldContainer[str]
        gateway_id: str
        incarnation: str
        resumed: bool
        known_calls: _containers.RepeatedScalarFieldContainer[str]
        credits: int
        heartbeat_interval_ms: int
        resume_window_ms: int
        max_frame_bytes: int
        durability: _tool_pb2.Durability
        known_calls_truncated: bool
        def __init__(self, protocol_minor: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., gateway_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., resumed: bool = ..., known_calls: _Optional[_Iterable[str]] = ..., credits: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., resume_window_ms: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., durability: _Optional[_Union[_tool_pb2.Durability, str]] = ..., known_calls_truncated: bool = ...) -> None: ...
    class Accepted(_message.Message):
        __slots__ = ("key", "durability", "remaining_ms", "joined")
        KEY_FIELD_NUMBER: _ClassVar[int]
        DURABILITY_FIELD_NUMBER: _ClassVar[int]
        REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
        JOINED_FIELD_NUMBER: _ClassVar[int]
        key: str
        durability: _tool_pb2.Durability
        remaining_ms: int
        joined: bool
        def __init__(self, key: _Optional[str] = ..., durability: _Optional[_Union[_tool_pb2.Durability, str]] = ..., remaining_ms: _Optional[int] = ..., joined: bool = ...) -> None: ...
    class Started(_message.Message):
        __slots__ = ("key", "attempt", "instance_id")
        KEY_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        key: str
        attempt: int
        instance_id: str
        def __init__(self, key: _Optional[str] = ..., attempt: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...
    class Progress(_message.Message):
        __slots__ = ("key", "progress")
        KEY_FIELD_NUMBER: _ClassVar[int]
        PROGRESS_FIELD_NUMBER: _ClassVar[int]
        key: str
        progress: _tool_pb2.CallEvent.Progress
        def __init__(self, key: _Optional[str] = ..., progress: _Optional[_Union[_tool_pb2.CallEvent.Progress, _Mapping]] = ...) -> None: ...
    class Chunk(_message.Message):
        __slots__ = ("key", "chunk")
        KEY_FIELD_NUMBER: _ClassVar[int]
        CHUNK_FIELD_NUMBER: _ClassVar[int]
        key: str
        chunk: _tool_pb2.CallEvent.Chunk
        def __init__(self, key: _Optional[str] = ..., chunk: _Optional[_Union[_tool_pb2.CallEvent.Chunk, _Mapping]] = ...) -> None: ...
    class Result(_message.Message):
        __slots__ = ("seq", "key", "attempts", "from_cache", "queue_us", "run_us", "instance_id", "final", "tool")
        SEQ_FIELD_NUMBER: _ClassVar[int]
        KEY_FIELD_NUMBER: _ClassVar[int]
        ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
        FROM_CACHE_FIELD_NUMBER: _ClassVar[int]
        QUEUE_US_FIELD_NUMBER: _ClassVar[int]
        RUN_US_FIELD_NUMBER: _ClassVar[int]
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        FINAL_FIELD_NUMBER: _ClassVar[int]
        TOOL_FIELD_NUMBER: _ClassVar[int]
        seq: int
        key: str
        attempts: int
        from_cache: bool
        queue_us: int
        run_us: int
        instance_id: str
        final: _tool_pb2.Final
        tool: str
        def __init__(self, seq: _Optional[int] = ..., key: _Optional[str] = ..., attempts: _Optional[int] = ..., from_cache: bool = ..., queue_us: _Optional[int] = ..., run_us: _Optional[int] = ..., instance_id: _Optional[str] = ..., final: _Optional[_Union[_tool_pb2.Final, _Mapping]] = ..., tool: _Optional[str] = ...) -> None: ...
    class Catalogue(_message.Message):
        __slots__ = ("tools", "version")
        TOOLS_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        tools: _containers.RepeatedCompositeFieldContainer[CatalogueEntry]
        version: int
        def __init__(self, tools: _Optional[_Iterable[_Union[CatalogueEntry, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...
    class Drain(_message.Message):
        __slots__ = ("deadline_ms", "reconnect_in_ms", "reason")
        DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
        RECONNECT_IN_MS_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        deadline_ms: int
        reconnect_in_ms: int
        reason: str
        def __init__(self, deadline_ms: _Optional[int] = ..., reconnect_in_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
    class Pong(_message.Message):
        __slots__ = ("nonce",)
        NONCE_FIELD_NUMBER: _ClassVar[int]
        nonce: int
        def __init__(self, nonce: _Optional[int] = ...) -> None: ...
    class Goodbye(_message.Message):
        __slots__ = ("outcome", "fault", "detail", "reconnect", "reconnect_in_ms")
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        FAULT_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        RECONNECT_FIELD_NUMBER: _ClassVar[int]
        RECONNECT_IN_MS_FIELD_NUMBER: _ClassVar[int]
        outcome: _tool_pb2.Outcome
        fault: _tool_pb2.Fault
        detail: str
        reconnect: bool
        reconnect_in_ms: int
        def __init__(self, outcome: _Optional[_Union[_tool_pb2.Outcome, str]] = ..., fault: _Optional[_Union[_tool_pb2.Fault, str]] = ..., detail: _Optional[str] = ..., reconnect: bool = ..., reconnect_in_ms: _Optional[int] = ...) -> None: ...
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[ServerFrame.Event]
    def __init__(self, events: _Optional[_Iterable[_Union[ServerFrame.Event, _Mapping]]] = ...) -> None: ...

class CatalogueEntry(_message.Message):
    __slots__ = ("spec", "backends", "backends_serving")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_SERVING_FIELD_NUMBER: _ClassVar[int]
    spec: _tool_pb2.ToolSpec
    backends: int
    backends_serving: int
    def __init__(self, spec: _Optional[_Union[_tool_pb2.ToolSpec, _Mapping]] = ..., backends: _Optional[int] = ..., backends_serving: _Optional[int] = ...) -> None: ...

class ListToolsRequest(_message.Message):
    __slots__ = ("visibility",)
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    visibility: _containers.RepeatedScalarFieldContainer[_tool_pb2.Visibility]
    def __init__(self, visibility: _Optional[_Iterable[_Union[_tool_pb2.Visibility, str]]] = ...) -> None: ...

class ListToolsResponse(_message.Message):
    __slots__ = ("tools", "version")
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    tools: _containers.RepeatedCompositeFieldContainer[CatalogueEntry]
    version: int
    def __init__(self, tools: _Optional[_Iterable[_Union[CatalogueEntry, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class GetCallRequest(_message.Message):
    __slots__ = ("key", "include_output")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    key: str
    include_output: bool
    def __init__(self, key: _Optional[str] = ..., include_output: bool = ...) -> None: ...

class GetCallResponse(_message.Message):
    __slots__ = ("found", "state", "tool", "session_id", "attempts", "result", "acked", "received_ms_ago", "remaining_ms", "detail")
    class CallState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CALL_STATE_UNSPECIFIED: _ClassVar[GetCallResponse.CallState]
        CALL_STATE_RECEIVED: _ClassVar[GetCallResponse.CallState]
        CALL_STATE_ACCEPTED: _ClassVar[GetCallResponse.CallState]
        CALL_STATE_RUNNING: _ClassVar[GetCallResponse.CallState]
        CALL_STATE_DONE: _ClassVar[GetCallResponse.CallState]
        CALL_STATE_RELEASED: _ClassVar[GetCallResponse.CallState]
        CALL_STATE_EXPIRED: _ClassVar[GetCallResponse.CallState]
    CALL_STATE_UNSPECIFIED: GetCallResponse.CallState
    CALL_STATE_RECEIVED: GetCallResponse.CallState
    CALL_STATE_ACCEPTED: GetCallResponse.CallState
    CALL_STATE_RUNNING: GetCallResponse.CallState
    CALL_STATE_DONE: GetCallResponse.CallState
    CALL_STATE_RELEASED: GetCallResponse.CallState
    CALL_STATE_EXPIRED: GetCallResponse.CallState
    class Attempt(_message.Message):
        __slots__ = ("attempt", "instance_id", "address", "outcome", "started", "started_ms_ago", "detail")
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        STARTED_FIELD_NUMBER: _ClassVar[int]
        STARTED_MS_AGO_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        attempt: int
        instance_id: str
        address: str
        outcome: _tool_pb2.Outcome
        started: _tool_pb2.Started
        started_ms_ago: int
        detail: str
        def __init__(self, attempt: _Optional[int] = ..., instance_id: _Optional[str] = ..., address: _Optional[str] = ..., outcome: _Optional[_Union[_tool_pb2.Outcome, str]] = ..., started: _Optional[_Union[_tool_pb2.Started, str]] = ..., started_ms_ago: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...
    FOUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    found: bool
    state: GetCallResponse.CallState
    tool: str
    session_id: str
    attempts: _containers.RepeatedCompositeFieldContainer[GetCallResponse.Attempt]
    result: ServerFrame.Result
    acked: bool
    received_ms_ago: int
    remaining_ms: int
    detail: str
    def __init__(self, found: bool = ..., state: _Optional[_Union[GetCallResponse.CallState, str]] = ..., tool: _Optional[str] = ..., session_id: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[GetCallResponse.Attempt, _Mapping]]] = ..., result: _Optional[_Union[ServerFrame.Result, _Mapping]] = ..., acked: bool = ..., received_ms_ago: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...
