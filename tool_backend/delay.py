"""Slow on purpose: which calls are delayed, and for how long. A pure function of the key, so runs can be repeated."""

from __future__ import annotations

import hashlib

from tool_backend.settings import DelaySettings


def chosen_delay(key: str, settings: DelaySettings) -> float:
    """Seconds to hold this call back before its function runs; 0 for calls that are not chosen."""
    if settings.share <= 0.0:
        return 0.0
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16, person=b"fermata-delay").digest()
    if _unit(digest[:8]) >= settings.share:
        return 0.0
    shortest, longest = settings.seconds
    return shortest + (longest - shortest) * _unit(digest[8:])


def _unit(eight_bytes: bytes) -> float:
    return int.from_bytes(eight_bytes, "big") / 2**64
