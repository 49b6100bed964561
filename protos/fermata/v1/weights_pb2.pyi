from fermata.v1 import tool_pb2 as _tool_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferBackend(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_BACKEND_UNSPECIFIED: _ClassVar[TransferBackend]
    TRANSFER_BACKEND_NCCL: _ClassVar[TransferBackend]
    TRANSFER_BACKEND_GLOO: _ClassVar[TransferBackend]

class UpdateKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_KIND_UNSPECIFIED: _ClassVar[UpdateKind]
    UPDATE_KIND_FULL: _ClassVar[UpdateKind]
    UPDATE_KIND_DELTA: _ClassVar[UpdateKind]
    UPDATE_KIND_LORA: _ClassVar[UpdateKind]

class KvPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_POLICY_UNSPECIFIED: _ClassVar[KvPolicy]
    KV_POLICY_RECOMPUTE: _ClassVar[KvPolicy]
    KV_POLICY_KEEP: _ClassVar[KvPolicy]

class DigestAlgorithm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIGEST_ALGORITHM_UNSPECIFIED: _ClassVar[DigestAlgorithm]
    DIGEST_ALGORITHM_SHA256: _ClassVar[DigestAlgorithm]

class SyncPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SYNC_PHASE_UNSPECIFIED: _ClassVar[SyncPhase]
    SYNC_PHASE_IDLE: _ClassVar[SyncPhase]
    SYNC_PHASE_STARTED: _ClassVar[SyncPhase]
    SYNC_PHASE_UPDATING: _ClassVar[SyncPhase]
    SYNC_PHASE_PROVING: _ClassVar[SyncPhase]
    SYNC_PHASE_FAILED: _ClassVar[SyncPhase]
TRANSFER_BACKEND_UNSPECIFIED: TransferBackend
TRANSFER_BACKEND_NCCL: TransferBackend
TRANSFER_BACKEND_GLOO: TransferBackend
UPDATE_KIND_UNSPECIFIED: UpdateKind
UPDATE_KIND_FULL: UpdateKind
UPDATE_KIND_DELTA: UpdateKind
UPDATE_KIND_LORA: UpdateKind
KV_POLICY_UNSPECIFIED: KvPolicy
KV_POLICY_RECOMPUTE: KvPolicy
KV_POLICY_KEEP: KvPolicy
DIGEST_ALGORITHM_UNSPECIFIED: DigestAlgorithm
DIGEST_ALGORITHM_SHA256: DigestAlgorithm
SYNC_PHASE_UNSPECIFIED: SyncPhase
SYNC_PHASE_IDLE: SyncPhase
SYNC_PHASE_STARTED: SyncPhase
SYNC_PHASE_UPDATING: SyncPhase
SYNC_PHASE_PROVING: SyncPhase
SYNC_PHASE_FAILED: SyncPhase

class WeightVersion(_message.Message):
    __slots__ = ("lineage", "number", "base_number")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BASE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    number: int
    base_number: int
    def __init__(self, lineage: _Optional[str] = ..., number: _Optional[int] = ..., base_number: _Optional[int] = ...) -> None: ...

class SyncTarget(_message.Message):
    __slots__ = ("model_id", "adapter_id")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    adapter_id: str
    def __init__(self, model_id: _Optional[str] = ..., adapter_id: _Optional[str] = ...) -> None: ...

class SyncContext(_message.Message):
    __slots__ = ("version", "target", "group_generation", "deadline_ms")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    GROUP_GENERATION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    target: SyncTarget
    group_generation: int
    deadline_ms: int
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ..., target: _Optional[_Union[SyncTarget, _Mapping]] = ..., group_generation: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class SyncStatus(_message.Message):
    __slots__ = ("outcome", "fault", "detail")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    outcome: _tool_pb2.Outcome
    fault: _tool_pb2.Fault
    detail: str
    def __init__(self, outcome: _Optional[_Union[_tool_pb2.Outcome, str]] = ..., fault: _Optional[_Union[_tool_pb2.Fault, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class InitRequest(_message.Message):
    __slots__ = ("context", "backend", "rendezvous_address", "rendezvous_port", "world_size", "rank_offset", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "packed", "packed_buffer_bytes", "packed_buffers", "engine_init_json")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_PORT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    PACKED_BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    PACKED_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_INIT_JSON_FIELD_NUMBER: _ClassVar[int]
    context: SyncContext
    backend: TransferBackend
    rendezvous_address: str
    rendezvous_port: int
    world_size: int
    rank_offset: int
    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    packed: bool
    packed_buffer_bytes: int
    packed_buffers: int
    engine_init_json: bytes
    def __init__(self, context: _Optional[_Union[SyncContext, _Mapping]] = ..., backend: _Optional[_Union[TransferBackend, str]] = ..., rendezvous_address: _Optional[str] = ..., rendezvous_port: _Optional[int] = ..., world_size: _Optional[int] = ..., rank_offset: _Optional[int] = ..., data_parallel_size: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., packed: bool = ..., packed_buffer_bytes: _Optional[int] = ..., packed_buffers: _Optional[int] = ..., engine_init_json: _Optional[bytes] = ...) -> None: ...

class InitResponse(_message.Message):
    __slots__ = ("status", "workers")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    status: SyncStatus
    workers: int
    def __init__(self, status: _Optional[_Union[SyncStatus, _Mapping]] = ..., workers: _Optional[int] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("context", "kind", "kv_policy")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    KV_POLICY_FIELD_NUMBER: _ClassVar[int]
    context: SyncContext
    kind: UpdateKind
    kv_policy: KvPolicy
    def __init__(self, context: _Optional[_Union[SyncContext, _Mapping]] = ..., kind: _Optional[_Union[UpdateKind, str]] = ..., kv_policy: _Optional[_Union[KvPolicy, str]] = ...) -> None: ...

class StartResponse(_message.Message):
    __slots__ = ("status", "pause_us")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_US_FIELD_NUMBER: _ClassVar[int]
    status: SyncStatus
    pause_us: int
    def __init__(self, status: _Optional[_Union[SyncStatus, _Mapping]] = ..., pause_us: _Optional[int] = ...) -> None: ...

class TensorMeta(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("context", "tensors")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    context: SyncContext
    tensors: _containers.RepeatedCompositeFieldContainer[TensorMeta]
    def __init__(self, context: _Optional[_Union[SyncContext, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorMeta, _Mapping]]] = ...) -> None: ...

class UpdateResponse(_message.Message):
    __slots__ = ("status", "receive_us")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_US_FIELD_NUMBER: _ClassVar[int]
    status: SyncStatus
    receive_us: int
    def __init__(self, status: _Optional[_Union[SyncStatus, _Mapping]] = ..., receive_us: _Optional[int] = ...) -> None: ...

class TensorDigest(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("context", "algorithm", "digests", "probes", "probe_tolerance")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    PROBE_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    context: SyncContext
    algorithm: DigestAlgorithm
    digests: _containers.RepeatedCompositeFieldContainer[TensorDigest]
    probes: _containers.RepeatedCompositeFieldContainer[Probe]
    probe_tolerance: float
    def __init__(self, context: _Optional[_Union[SyncContext, _Mapping]] = ..., algorithm: _Optional[_Union[DigestAlgorithm, str]] = ..., digests: _Optional[_Iterable[_Union[TensorDigest, _Mapping]]] = ..., probes: _Optional[_Iterable[_Union[Probe, _Mapping]]] = ..., probe_tolerance: _Optional[float] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("received_equal", "received_mismatch", "shards", "probe_max_diff", "probe_mean_diff", "probe_tokens", "holds", "detail")
    RECEIVED_EQUAL_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_MISMATCH_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PROBE_MAX_DIFF_FIELD_NUMBER: _ClassVar[int]
    PROBE_MEAN_DIFF_FIELD_NUMBER: _ClassVar[int]
    PROBE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    received_equal: bool
    received_mismatch: _containers.RepeatedScalarFieldContainer[str]
    shards: _containers.RepeatedCompositeFieldContainer[ShardDigest]
    probe_max_diff: float
    probe_mean_diff: float
    probe_tokens: int
    holds: bool
    detail: str
    def __init__(self, received_equal: bool = ..., received_mismatch: _Optional[_Iterable[str]] = ..., shards: _Optional[_Iterable[_Union[ShardDigest, _Mapping]]] = ..., probe_max_diff: _Optional[float] = ..., probe_mean_diff: _Optional[float] = ..., probe_tokens: _Optional[int] = ..., holds: bool = ..., detail: _Optional[str] = ...) -> None: ...

class ShardDigest(_message.Message):
    __slots__ = ("worker", "layout_fingerprint", "digest")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker: int
    layout_fingerprint: str
    digest: bytes
    def __init__(self, worker: _Optional[int] = ..., layout_fingerprint: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ("status", "proof", "load_us", "prove_us", "paused_us", "serving")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    LOAD_US_FIELD_NUMBER: _ClassVar[int]
    PROVE_US_FIELD_NUMBER: _ClassVar[int]
    PAUSED_US_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    status: SyncStatus
    proof: Proof
    load_us: int
    prove_us: int
    paused_us: int
    serving: bool
    def __init__(self, status: _Optional[_Union[SyncStatus, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., load_us: _Optional[int] = ..., prove_us: _Optional[int] = ..., paused_us: _Optional[int] = ..., serving: bool = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("context", "reason")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    context: SyncContext
    reason: str
    def __init__(self, context: _Optional[_Union[SyncContext, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("status", "serving")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    status: SyncStatus
    serving: bool
    def __init__(self, status: _Optional[_Union[SyncStatus, _Mapping]] = ..., serving: bool = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("verify",)
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    verify: bool
    def __init__(self, verify: bool = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("status", "serving", "served", "phase", "group_generation", "last_proof", "unchanged", "model_id", "model_hash", "workers", "backends")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GROUP_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAST_PROOF_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    status: SyncStatus
    serving: bool
    served: WeightVersion
    phase: SyncPhase
    group_generation: int
    last_proof: Proof
    unchanged: bool
    model_id: str
    model_hash: str
    workers: int
    backends: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, status: _Optional[_Union[SyncStatus, _Mapping]] = ..., serving: bool = ..., served: _Optional[_Union[WeightVersion, _Mapping]] = ..., phase: _Optional[_Union[SyncPhase, str]] = ..., group_generation: _Optional[int] = ..., last_proof: _Optional[_Union[Proof, _Mapping]] = ..., unchanged: bool = ..., model_id: _Optional[str] = ..., model_hash: _Optional[str] = ..., workers: _Optional[int] = ..., backends: _Optional[_Iterable[str]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("node_id", "address", "rank_offset", "workers")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    rank_offset: int
    workers: int
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., rank_offset: _Optional[int] = ..., workers: _Optional[int] = ...) -> None: ...

class MembershipRequest(_message.Message):
    __slots__ = ("group_generation", "members", "leave")
    GROUP_GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    group_generation: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    leave: bool
    def __init__(self, group_generation: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., leave: bool = ...) -> None: ...

class MembershipResponse(_message.Message):
    __slots__ = ("status", "group_generation")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    GROUP_GENERATION_FIELD_NUMBER: _ClassVar[int]
    status: SyncStatus
    group_generation: int
    def __init__(self, status: _Optional[_Union[SyncStatus, _Mapping]] = ..., group_generation: _Optional[int] = ...) -> None: ...
