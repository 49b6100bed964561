from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_OK: _ClassVar[Outcome]
    OUTCOME_TOOL_ERROR: _ClassVar[Outcome]
    OUTCOME_INVALID_ARGS: _ClassVar[Outcome]
    OUTCOME_UNKNOWN_TOOL: _ClassVar[Outcome]
    OUTCOME_PARSE_ERROR: _ClassVar[Outcome]
    OUTCOME_TOOL_TIMEOUT: _ClassVar[Outcome]
    OUTCOME_TOOL_OOM: _ClassVar[Outcome]
    OUTCOME_ATTEMPT_TIMEOUT: _ClassVar[Outcome]
    OUTCOME_DEADLINE_EXCEEDED: _ClassVar[Outcome]
    OUTCOME_OVERLOADED: _ClassVar[Outcome]
    OUTCOME_QUEUE_TIMEOUT: _ClassVar[Outcome]
    OUTCOME_QUOTA_EXCEEDED: _ClassVar[Outcome]
    OUTCOME_NOT_STARTED: _ClassVar[Outcome]
    OUTCOME_INDETERMINATE: _ClassVar[Outcome]
    OUTCOME_SESSION_LOST: _ClassVar[Outcome]
    OUTCOME_RESULT_EXPIRED: _ClassVar[Outcome]
    OUTCOME_KEY_CONFLICT: _ClassVar[Outcome]
    OUTCOME_FENCED: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
    OUTCOME_PERMISSION: _ClassVar[Outcome]
    OUTCOME_INTERNAL: _ClassVar[Outcome]
    OUTCOME_PROTOCOL: _ClassVar[Outcome]

class Fault(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_UNSPECIFIED: _ClassVar[Fault]
    FAULT_NONE: _ClassVar[Fault]
    FAULT_MODEL: _ClassVar[Fault]
    FAULT_INFRA: _ClassVar[Fault]
    FAULT_CALLER: _ClassVar[Fault]

class Started(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STARTED_UNSPECIFIED: _ClassVar[Started]
    STARTED_NO: _ClassVar[Started]
    STARTED_YES: _ClassVar[Started]
    STARTED_UNKNOWN: _ClassVar[Started]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_MEMORY: _ClassVar[Durability]
    DURABILITY_PROCESS: _ClassVar[Durability]
    DURABILITY_HOST: _ClassVar[Durability]

class Visibility(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VISIBILITY_UNSPECIFIED: _ClassVar[Visibility]
    VISIBILITY_MODEL: _ClassVar[Visibility]
    VISIBILITY_GRADER: _ClassVar[Visibility]
    VISIBILITY_HIDDEN: _ClassVar[Visibility]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_OK: Outcome
OUTCOME_TOOL_ERROR: Outcome
OUTCOME_INVALID_ARGS: Outcome
OUTCOME_UNKNOWN_TOOL: Outcome
OUTCOME_PARSE_ERROR: Outcome
OUTCOME_TOOL_TIMEOUT: Outcome
OUTCOME_TOOL_OOM: Outcome
OUTCOME_ATTEMPT_TIMEOUT: Outcome
OUTCOME_DEADLINE_EXCEEDED: Outcome
OUTCOME_OVERLOADED: Outcome
OUTCOME_QUEUE_TIMEOUT: Outcome
OUTCOME_QUOTA_EXCEEDED: Outcome
OUTCOME_NOT_STARTED: Outcome
OUTCOME_INDETERMINATE: Outcome
OUTCOME_SESSION_LOST: Outcome
OUTCOME_RESULT_EXPIRED: Outcome
OUTCOME_KEY_CONFLICT: Outcome
OUTCOME_FENCED: Outcome
OUTCOME_CANCELLED: Outcome
OUTCOME_PERMISSION: Outcome
OUTCOME_INTERNAL: Outcome
OUTCOME_PROTOCOL: Outcome
FAULT_UNSPECIFIED: Fault
FAULT_NONE: Fault
FAULT_MODEL: Fault
FAULT_INFRA: Fault
FAULT_CALLER: Fault
STARTED_UNSPECIFIED: Started
STARTED_NO: Started
STARTED_YES: Started
STARTED_UNKNOWN: Started
DURABILITY_UNSPECIFIED: Durability
DURABILITY_MEMORY: Durability
DURABILITY_PROCESS: Durability
DURABILITY_HOST: Durability
VISIBILITY_UNSPECIFIED: Visibility
VISIBILITY_MODEL: Visibility
VISIBILITY_GRADER: Visibility
VISIBILITY_HIDDEN: Visibility

class ToolSpec(_message.Message):
    __slots__ = ("name", "description", "input_schema_json", "output_schema_json", "idempotent", "read_only", "stateful", "visibility", "timeout_fault", "default_timeout_ms", "max_timeout_ms", "max_concurrency", "max_output_bytes", "cost_unit", "labels", "version_hash")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    INPUT_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENT_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    STATEFUL_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FAULT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COST_UNIT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VERSION_HASH_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    input_schema_json: bytes
    output_schema_json: bytes
    idempotent: bool
    read_only: bool
    stateful: bool
    visibility: Visibility
    timeout_fault: Fault
    default_timeout_ms: int
    max_timeout_ms: int
    max_concurrency: int
    max_output_bytes: int
    cost_unit: str
    labels: _containers.ScalarMap[str, str]
    version_hash: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., input_schema_json: _Optional[bytes] = ..., output_schema_json: _Optional[bytes] = ..., idempotent: bool = ..., read_only: bool = ..., stateful: bool = ..., visibility: _Optional[_Union[Visibility, str]] = ..., timeout_fault: _Optional[_Union[Fault, str]] = ..., default_timeout_ms: _Optional[int] = ..., max_timeout_ms: _Optional[int] = ..., max_concurrency: _Optional[int] = ..., max_output_bytes: _Optional[int] = ..., cost_unit: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., version_hash: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_minor", "features")
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    protocol_minor: int
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_minor: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class Journal(_message.Message):
    __slots__ = ("durability", "retention_ms", "max_entries", "max_bytes")
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    durability: Durability
    retention_ms: int
    max_entries: int
    max_bytes: int
    def __init__(self, durability: _Optional[_Union[Durability, str]] = ..., retention_ms: _Optional[int] = ..., max_entries: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol_minor", "features", "instance_id", "journal", "tools", "uptime_ms", "software")
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    protocol_minor: int
    features: _containers.RepeatedScalarFieldContainer[str]
    instance_id: str
    journal: Journal
    tools: _containers.RepeatedCompositeFieldContainer[ToolSpec]
    uptime_ms: int
    software: str
    def __init__(self, protocol_minor: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., instance_id: _Optional[str] = ..., journal: _Optional[_Union[Journal, _Mapping]] = ..., tools: _Optional[_Iterable[_Union[ToolSpec, _Mapping]]] = ..., uptime_ms: _Optional[int] = ..., software: _Optional[str] = ...) -> None: ...

class SessionRef(_message.Message):
    __slots__ = ("session_id", "epoch", "seq")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    seq: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class Invocation(_message.Message):
    __slots__ = ("key", "call_id", "attempt", "tool", "args_json", "args_sha256", "expected_instance_id", "must_exist", "session", "attempt_timeout_ms", "heartbeat_timeout_ms", "max_output_bytes", "tenant", "run_id", "context", "traceparent")
    class ContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    ARGS_SHA256_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MUST_EXIST_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    key: str
    call_id: str
    attempt: int
    tool: str
    args_json: bytes
    args_sha256: bytes
    expected_instance_id: str
    must_exist: bool
    session: SessionRef
    attempt_timeout_ms: int
    heartbeat_timeout_ms: int
    max_output_bytes: int
    tenant: str
    run_id: str
    context: _containers.ScalarMap[str, str]
    traceparent: str
    def __init__(self, key: _Optional[str] = ..., call_id: _Optional[str] = ..., attempt: _Optional[int] = ..., tool: _Optional[str] = ..., args_json: _Optional[bytes] = ..., args_sha256: _Optional[bytes] = ..., expected_instance_id: _Optional[str] = ..., must_exist: bool = ..., session: _Optional[_Union[SessionRef, _Mapping]] = ..., attempt_timeout_ms: _Optional[int] = ..., heartbeat_timeout_ms: _Optional[int] = ..., max_output_bytes: _Optional[int] = ..., tenant: _Optional[str] = ..., run_id: _Optional[str] = ..., context: _Optional[_Mapping[str, str]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "inline", "uri", "mime", "sha256")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    MIME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    inline: bytes
    uri: str
    mime: str
    sha256: bytes
    def __init__(self, text: _Optional[bytes] = ..., inline: _Optional[bytes] = ..., uri: _Optional[str] = ..., mime: _Optional[str] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("cost", "cost_unit", "run_us", "cpu_us", "peak_memory_bytes")
    COST_FIELD_NUMBER: _ClassVar[int]
    COST_UNIT_FIELD_NUMBER: _ClassVar[int]
    RUN_US_FIELD_NUMBER: _ClassVar[int]
    CPU_US_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    cost: float
    cost_unit: str
    run_us: int
    cpu_us: int
    peak_memory_bytes: int
    def __init__(self, cost: _Optional[float] = ..., cost_unit: _Optional[str] = ..., run_us: _Optional[int] = ..., cpu_us: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ...) -> None: ...

class Final(_message.Message):
    __slots__ = ("outcome", "fault", "started", "parts", "structured_json", "total_bytes", "truncated", "invalid_utf8", "usage", "retry_after_ms", "detail")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_JSON_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    INVALID_UTF8_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    fault: Fault
    started: Started
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    structured_json: bytes
    total_bytes: int
    truncated: bool
    invalid_utf8: bool
    usage: Usage
    retry_after_ms: int
    detail: str
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., fault: _Optional[_Union[Fault, str]] = ..., started: _Optional[_Union[Started, str]] = ..., parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., structured_json: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., truncated: bool = ..., invalid_utf8: bool = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., retry_after_ms: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class CallEvent(_message.Message):
    __slots__ = ("accepted", "heartbeat", "progress", "chunk", "final")
    class Accepted(_message.Message):
        __slots__ = ("instance_id", "joined", "durability")
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        JOINED_FIELD_NUMBER: _ClassVar[int]
        DURABILITY_FIELD_NUMBER: _ClassVar[int]
        instance_id: str
        joined: bool
        durability: Durability
        def __init__(self, instance_id: _Optional[str] = ..., joined: bool = ..., durability: _Optional[_Union[Durability, str]] = ...) -> None: ...
    class Heartbeat(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Progress(_message.Message):
        __slots__ = ("fraction", "message")
        FRACTION_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        fraction: float
        message: bytes
        def __init__(self, fraction: _Optional[float] = ..., message: _Optional[bytes] = ...) -> None: ...
    class Chunk(_message.Message):
        __slots__ = ("offset", "data")
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        offset: int
        data: bytes
        def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    accepted: CallEvent.Accepted
    heartbeat: CallEvent.Heartbeat
    progress: CallEvent.Progress
    chunk: CallEvent.Chunk
    final: Final
    def __init__(self, accepted: _Optional[_Union[CallEvent.Accepted, _Mapping]] = ..., heartbeat: _Optional[_Union[CallEvent.Heartbeat, _Mapping]] = ..., progress: _Optional[_Union[CallEvent.Progress, _Mapping]] = ..., chunk: _Optional[_Union[CallEvent.Chunk, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ...) -> None: ...

class InvokeRequest(_message.Message):
    __slots__ = ("invocation",)
    INVOCATION_FIELD_NUMBER: _ClassVar[int]
    invocation: Invocation
    def __init__(self, invocation: _Optional[_Union[Invocation, _Mapping]] = ...) -> None: ...

class InvokeResponse(_message.Message):
    __slots__ = ("final", "instance_id")
    FINAL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    final: Final
    instance_id: str
    def __init__(self, final: _Optional[_Union[Final, _Mapping]] = ..., instance_id: _Optional[str] = ...) -> None: ...

class InvokeStreamRequest(_message.Message):
    __slots__ = ("invocation",)
    INVOCATION_FIELD_NUMBER: _ClassVar[int]
    invocation: Invocation
    def __init__(self, invocation: _Optional[_Union[Invocation, _Mapping]] = ...) -> None: ...

class InvokeStreamResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: CallEvent
    def __init__(self, event: _Optional[_Union[CallEvent, _Mapping]] = ...) -> None: ...

class InvokeManyRequest(_message.Message):
    __slots__ = ("events",)
    class Event(_message.Message):
        __slots__ = ("invoke", "cancel", "window")
        INVOKE_FIELD_NUMBER: _ClassVar[int]
        CANCEL_FIELD_NUMBER: _ClassVar[int]
        WINDOW_FIELD_NUMBER: _ClassVar[int]
        invoke: Invocation
        cancel: CancelRequest
        window: InvokeManyRequest.Window
        def __init__(self, invoke: _Optional[_Union[Invocation, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., window: _Optional[_Union[InvokeManyRequest.Window, _Mapping]] = ...) -> None: ...
    class Window(_message.Message):
        __slots__ = ("add_bytes",)
        ADD_BYTES_FIELD_NUMBER: _ClassVar[int]
        add_bytes: int
        def __init__(self, add_bytes: _Optional[int] = ...) -> None: ...
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[InvokeManyRequest.Event]
    def __init__(self, events: _Optional[_Iterable[_Union[InvokeManyRequest.Event, _Mapping]]] = ...) -> None: ...

class InvokeManyResponse(_message.Message):
    __slots__ = ("events",)
    class Event(_message.Message):
        __slots__ = ("key", "event")
        KEY_FIELD_NUMBER: _ClassVar[int]
        EVENT_FIELD_NUMBER: _ClassVar[int]
        key: str
        event: CallEvent
        def __init__(self, key: _Optional[str] = ..., event: _Optional[_Union[CallEvent, _Mapping]] = ...) -> None: ...
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[InvokeManyResponse.Event]
    def __init__(self, events: _Optional[_Iterable[_Union[InvokeManyResponse.Event, _Mapping]]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("key", "args_sha256", "expected_instance_id", "chunk_offset", "if_absent", "heartbeat_timeout_ms", "tenant", "run_id")
    class IfAbsent(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        IF_ABSENT_UNSPECIFIED: _ClassVar[AttachRequest.IfAbsent]
        IF_ABSENT_FAIL: _ClassVar[AttachRequest.IfAbsent]
        IF_ABSENT_TOMBSTONE: _ClassVar[AttachRequest.IfAbsent]
    IF_ABSENT_UNSPECIFIED: AttachRequest.IfAbsent
    IF_ABSENT_FAIL: AttachRequest.IfAbsent
    IF_ABSENT_TOMBSTONE: AttachRequest.IfAbsent
    KEY_FIELD_NUMBER: _ClassVar[int]
    ARGS_SHA256_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    IF_ABSENT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    key: str
    args_sha256: bytes
    expected_instance_id: str
    chunk_offset: int
    if_absent: AttachRequest.IfAbsent
    heartbeat_timeout_ms: int
    tenant: str
    run_id: str
    def __init__(self, key: _Optional[str] = ..., args_sha256: _Optional[bytes] = ..., expected_instance_id: _Optional[str] = ..., chunk_offset: _Optional[int] = ..., if_absent: _Optional[_Union[AttachRequest.IfAbsent, str]] = ..., heartbeat_timeout_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("event", "absent")
    class Absent(_message.Message):
        __slots__ = ("instance_id", "tombstoned", "instance_mismatch", "uptime_ms", "expired")
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        TOMBSTONED_FIELD_NUMBER: _ClassVar[int]
        INSTANCE_MISMATCH_FIELD_NUMBER: _ClassVar[int]
        UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
        EXPIRED_FIELD_NUMBER: _ClassVar[int]
        instance_id: str
        tombstoned: bool
        instance_mismatch: bool
        uptime_ms: int
        expired: bool
        def __init__(self, instance_id: _Optional[str] = ..., tombstoned: bool = ..., instance_mismatch: bool = ..., uptime_ms: _Optional[int] = ..., expired: bool = ...) -> None: ...
    EVENT_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    event: CallEvent
    absent: AttachResponse.Absent
    def __init__(self, event: _Optional[_Union[CallEvent, _Mapping]] = ..., absent: _Optional[_Union[AttachResponse.Absent, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: str
    reason: str
    def __init__(self, key: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("state",)
    class CancelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CANCEL_STATE_UNSPECIFIED: _ClassVar[CancelResponse.CancelState]
        CANCEL_STATE_STOPPING: _ClassVar[CancelResponse.CancelState]
        CANCEL_STATE_ALREADY_DONE: _ClassVar[CancelResponse.CancelState]
        CANCEL_STATE_NOT_FOUND: _ClassVar[CancelResponse.CancelState]
    CANCEL_STATE_UNSPECIFIED: CancelResponse.CancelState
    CANCEL_STATE_STOPPING: CancelResponse.CancelState
    CANCEL_STATE_ALREADY_DONE: CancelResponse.CancelState
    CANCEL_STATE_NOT_FOUND: CancelResponse.CancelState
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: CancelResponse.CancelState
    def __init__(self, state: _Optional[_Union[CancelResponse.CancelState, str]] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "tool", "trajectory_id", "lease_ms", "args_json", "tenant", "run_id", "expected_instance_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    tool: str
    trajectory_id: str
    lease_ms: int
    args_json: bytes
    tenant: str
    run_id: str
    expected_instance_id: str
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., tool: _Optional[str] = ..., trajectory_id: _Optional[str] = ..., lease_ms: _Optional[int] = ..., args_json: _Optional[bytes] = ..., tenant: _Optional[str] = ..., run_id: _Optional[str] = ..., expected_instance_id: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: SessionStatus
    def __init__(self, status: _Optional[_Union[SessionStatus, _Mapping]] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("outcome", "fault", "detail", "instance_id", "epoch", "lease_ms", "last_seq")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    fault: Fault
    detail: str
    instance_id: str
    epoch: int
    lease_ms: int
    last_seq: int
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., fault: _Optional[_Union[Fault, str]] = ..., detail: _Optional[str] = ..., instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_ms: _Optional[int] = ..., last_seq: _Optional[int] = ...) -> None: ...

class RenewSessionRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "lease_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    lease_ms: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RenewSessionResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: SessionStatus
    def __init__(self, status: _Optional[_Union[SessionStatus, _Mapping]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: SessionStatus
    def __init__(self, status: _Optional[_Union[SessionStatus, _Mapping]] = ...) -> None: ...
