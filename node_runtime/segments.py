"""The tokens of a trajectory as packed columns, and the wire form of them.

Owns: `Columns` (ids, logprobs and segments in arrays, 8 bytes a model token), packing to and from `fermata.v1.Segment`,
and `merge`, by which the holder of a snapshot takes in a delta.

Invariant: columns only grow at their end; every token lies in exactly one segment; a model token has its sampling
logprob and the weight version that made it, and no other token has either.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import weights_pb2 as weights_pb

PROMPT = pb.SEGMENT_KIND_PROMPT
MODEL = pb.SEGMENT_KIND_MODEL
TOOL = pb.SEGMENT_KIND_TOOL
INJECTED = pb.SEGMENT_KIND_INJECTED

if array("i").itemsize != 4 or array("f").itemsize != 4:  # pragma: no cover - no supported platform has this
    raise ImportError("packed columns need 4-byte int and float arrays")


class SegmentError(ValueError):
    """A segment or snapshot contradicts itself or what it builds on; the message says how."""


class VersionLike(Protocol):
    """Whatever names a weight version: the proto message, `Version`, or an engine's own record."""

    @property
    def lineage(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def base_number(self) -> int: ...


class Version(NamedTuple):
    """A weight version; two are comparable by `number` only within one lineage."""

    lineage: str
    number: int
    base_number: int = 0

    @classmethod
    def of(cls, version: VersionLike) -> Version:
        return version if isinstance(version, Version) else cls(version.lineage, version.number, version.base_number)

    def to_proto(self) -> weights_pb.WeightVersion:
        return weights_pb.WeightVersion(lineage=self.lineage, number=self.number, base_number=self.base_number)

    def at_least(self, wanted: Version) -> bool:
        """Whether weights of this version satisfy a wish for `wanted` (an unset wish is always satisfied)."""
        return not wanted.lineage or (self.lineage == wanted.lineage and self.number >= wanted.number)


@dataclass(slots=True)
class SegmentView:
    """One run of tokens: where it lies in the columns and what is said of all of it."""

    kind: pb.SegmentKind
    start: int
    stop: int
    turn: int = 0
    call_key: str = ""
    kv_mode: pb.KvMode = pb.KV_MODE_UNSPECIFIED
    logprob_start: int = 0  # offset in `Columns.logprobs`; MODEL only
    versions: list[tuple[Version, int]] = field(default_factory=list)
    loss_bits: bytes = b""  # explicit mask, one bit a token; empty is the rule of the kind

    def __len__(self) -> int:
        return self.stop - self.start


class Columns:
    """Append-only packed columns of one trajectory.

    `ids` is int32 over all tokens, `logprobs` float32 over the model tokens alone (see `SegmentView.logprob_start`).
    Both can be read without copying through the buffer protocol (`numpy.frombuffer`).
    """

    __slots__ = ("ids", "logprobs", "segments")

    def __init__(self) -> None:
        self.ids = array("i")
        self.logprobs = array("f")
        self.segments: list[SegmentView] = []

    def __len__(self) -> int:
        return len(self.ids)

    def append(
        self,
        kind: pb.SegmentKind,
        token_ids: Sequence[int],
        *,
        logprobs: Sequence[float] = (),
        version: VersionLike | None = None,
        turn: int = 0,
        call_key: str = "",
        kv_mode: pb.KvMode = pb.KV_MODE_UNSPECIFIED,
    ) -> None:
        """Add tokens at the end; tokens that continue the last segment (same kind, turn, call) lengthen it."""
        if not len(token_ids):
            return
        if kind == MODEL:
            if version is None or len(logprobs) != len(token_ids):
                raise SegmentError(
                    f"{len(token_ids)} model tokens came with {len(logprobs)} logprobs and "
                    f"{'no' if version is None else 'a'} weight version; each token needs both"
                )
        elif len(logprobs) or version is not None:
            raise SegmentError("only model tokens carry logprobs and a weight version")
        start = len(self.ids)
        self.ids.extend(token_ids)
        last = self.segments[-1] if self.segments else None
        same = (kind, turn, call_key, kv_mode, b"")
        joins = last is not None and (last.kind, last.turn, last.call_key, last.kv_mode, last.loss_bits) == same
        if last is None or not joins:
            last = SegmentView(kind, start, start, turn, call_key, kv_mode, len(self.logprobs))
            self.segments.append(last)
        last.stop = len(self.ids)
        if version is not None:
            self.logprobs.extend(logprobs)
            stamp = Version.of(version)
            if last.versions and last.versions[-1][0] == stamp:
                last.versions[-1] = (stamp, last.versions[-1][1] + len(token_ids))
            else:
                last.versions.append((stamp, len(token_ids)))

    def cut(self, segments: int) -> None:
        """Keep the first `segments` segments: an unfinished turn is given up when a trajectory is handed over."""
        if segments >= len(self.segments):
            return
        tokens = self.segments[segments].start
        kept = sum(len(s) for s in self.segments[:segments] if s.kind == MODEL)
        del self.segments[segments:], self.ids[tokens:], self.logprobs[kept:]

    def pack(self, first: int = 0, last: int | None = None) -> list[pb.Segment]:
        """Segments `first` up to, not including, `last` in wire form."""
        return [self._pack_one(segment) for segment in self.segments[first:last]]

    def _pack_one(self, segment: SegmentView) -> pb.Segment:
        packed = pb.Segment(
            kind=segment.kind,
            token_ids=_to_bytes(self.ids[segment.start : segment.stop]),
            loss_mask=segment.loss_bits,
            turn=segment.turn,
            call_key=segment.call_key,
            kv_mode=segment.kv_mode,
        )
        if segment.kind == MODEL:
            packed.logprobs = _to_bytes(self.logprobs[segment.logprob_start : segment.logprob_start + len(segment)])
            packed.versions.extend(pb.VersionSpan(version=v.to_proto(), tokens=n) for v, n in segment.versions)
        return packed

    @classmethod
    def unpack(cls, segments: Iterable[pb.Segment]) -> Columns:
        """Columns from their wire form; a segment that contradicts itself is a `SegmentError`."""
        columns = cls()
        for index, segment in enumerate(segments):
            columns._unpack_one(index, segment)
        return columns

    def _unpack_one(self, index: int, segment: pb.Segment) -> None:
        if len(segment.token_ids) % 4 or len(segment.logprobs) % 4:
            raise SegmentError(f"segment {index} has columns that are not a whole number of 4-byte values")
        tokens = len(segment.token_ids) // 4
        if segment.loss_mask and len(segment.loss_mask) != (tokens + 7) // 8:
            raise SegmentError(f"segment {index} has {tokens} tokens but a loss mask of {len(segment.loss_mask)} bytes")
        versions = [(Version.of(span.version), span.tokens) for span in segment.versions]
        if segment.kind == MODEL:
            spanned = sum(count for _, count in versions)
            if len(segment.logprobs) != len(segment.token_ids) or spanned != tokens:
                raise SegmentError(
                    f"segment {index} has {tokens} model tokens, {len(segment.logprobs) // 4} logprobs "
                    f"and versions for {spanned}; all three must be equal"
                )
        elif segment.logprobs or versions:
            raise SegmentError(f"segment {index} carries logprobs or versions, which only model tokens have")
        elif any(segment.loss_mask):
            raise SegmentError(f"segment {index} trains tokens that no model sampled: its loss mask must be empty or 0")
        logprobs = _from_bytes("f", segment.logprobs)
        # One that is no number makes the sum none; float32 values cannot overflow a double.
        if not math.isfinite(sum(logprobs)):
            raise SegmentError(f"segment {index} has a logprob that is no finite number")
        start, logprob_start = len(self.ids), len(self.logprobs)
        self.ids.extend(_from_bytes("i", segment.token_ids))
        self.logprobs.extend(logprobs)
        view = SegmentView(segment.kind, start, len(self.ids), segment.turn, segment.call_key, segment.kv_mode)
        view.logprob_start, view.versions, view.loss_bits = logprob_start, versions, segment.loss_mask
        self.segments.append(view)

    def loss_mask(self) -> bytearray:
        """One byte a token, 1 where it is trained: model tokens, unless a segment's own mask says otherwise."""
        mask = bytearray(len(self.ids))
        for segment in self.segments:
            if segment.loss_bits:
                for offset in range(len(segment)):
                    mask[segment.start + offset] = segment.loss_bits[offset >> 3] >> (offset & 7) & 1
            elif segment.kind == MODEL:
                mask[segment.start : segment.stop] = b"\x01" * len(segment)
        return mask

    def aligned_logprobs(self) -> array[float]:
        """Sampling logprobs aligned with `ids`; 0.0 where a token was not sampled."""
        aligned = array("f", bytes(4 * len(self.ids)))
        for segment in self.segments:
            if segment.kind == MODEL:
                stop = segment.logprob_start + len(segment)
                aligned[segment.start : segment.stop] = self.logprobs[segment.logprob_start : stop]
        return aligned

    def version_spans(self) -> Iterator[tuple[int, int, Version]]:
        """(start, stop, version) over the model tokens, in order."""
        for segment in self.segments:
            start = segment.start
            for version, count in segment.versions:
                yield start, start + count, version
                start += count

    def oldest_version(self) -> Version | None:
        """The lowest version number that made a model token; None where nothing was sampled."""
        return min((version for _, _, version in self.version_spans()), key=lambda v: v.number, default=None)

    def model_tokens(self) -> int:
        return len(self.logprobs)


def merge(held: pb.Snapshot | None, delta: pb.Snapshot) -> pb.Snapshot:
    """The whole snapshot after a delta: `held` up to the delta's base, then the delta.

    Segments past the base are dropped, so a delta may be taken in again, or after one that its maker did not know
    to have arrived. The result has base 0, as `Resume` wants it.
    """
    kept = list(held.segments[: delta.base_segments]) if held is not None else []
    if len(kept) != delta.base_segments:
        raise SegmentError(
            f"snapshot {delta.snapshot_seq} builds on {delta.base_segments} segments but {len(kept)} are held; "
            "only what was acknowledged may be built on"
        )
    tokens = sum(len(segment.token_ids) // 4 for segment in kept)
    if tokens != delta.base_tokens:
        raise SegmentError(
            f"snapshot {delta.snapshot_seq} builds on {delta.base_tokens} tokens but the held segments have {tokens}"
        )
    merged = pb.Snapshot()
    merged.CopyFrom(delta)
    del merged.segments[:]
    merged.segments.extend(kept)
    merged.segments.extend(delta.segments)
    merged.base_snapshot_seq = merged.base_tokens = merged.base_segments = 0
    total = tokens + sum(len(segment.token_ids) // 4 for segment in delta.segments)
    if total != delta.total_tokens:
        raise SegmentError(f"snapshot {delta.snapshot_seq} says {delta.total_tokens} tokens but merges to {total}")
    return merged


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as the wire has them: int32, little-endian."""
    return _to_bytes(array("i", token_ids))


def unpack_ids(data: bytes) -> array[int]:
    if len(data) % 4:
        raise SegmentError(f"{len(data)} bytes are not a whole number of int32 token ids")
    return _from_bytes("i", data)


def _to_bytes(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":  # pragma: no cover - the wire is little-endian
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _from_bytes(code: str, data: bytes) -> array[int]:
    values: array[int] = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":  # pragma: no cover - the wire is little-endian
        values.byteswap()
    return values
