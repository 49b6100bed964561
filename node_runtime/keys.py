"""The key of a call: run/trajectory/generation/turn/ordinal.

Invariant: parse and str are inverses; there is one spelling of each key (no leading zeros, no stray characters), so
keys may be compared as text.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

MAX_KEY_LENGTH: Final = 512
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_UINT32 = 2**32


class InvalidKey(ValueError):
    """A key or an id that may not be used; the text says which part and what would be right."""


def check_id(what: str, value: str) -> str:
    """Returns `value` where it may be a part of a key; else one sentence."""
    if not value:
        raise InvalidKey(f"{what} is empty: give it at least one character")
    if len(value) > MAX_KEY_LENGTH:
        raise InvalidKey(f"{what} has {len(value)} characters: at most {MAX_KEY_LENGTH} fit into a key")
    if "/" in value:
        raise InvalidKey(f"{what} {_short(value)} contains '/', which separates the parts of a key: use '-' or '.'")
    if not value.isprintable():
        raise InvalidKey(f"{what} {_short(value)} contains a control or unprintable character: use letters and digits")
    return value


def _short(value: str) -> str:
    return repr(value if len(value) <= 64 else value[:61] + "...")


@dataclass(frozen=True, slots=True, order=True)
class CallKey:
    """One call of one turn. `generation` counts how often the trajectory was taken up by an owner, `turn` and
    `ordinal` count from 0."""

    run_id: str
    trajectory_id: str
    generation: int
    turn: int
    ordinal: int

    def __post_init__(self) -> None:
        check_id("the run id", self.run_id)
        check_id("the trajectory id", self.trajectory_id)
        for name in ("generation", "turn", "ordinal"):
            value = getattr(self, name)
            if not 0 <= value < _UINT32:
                raise InvalidKey(f"the {name} of a key must be between 0 and {_UINT32 - 1}, got {value}")
        length = len(str(self))
        if length > MAX_KEY_LENGTH:
            raise InvalidKey(f"the key has {length} characters, at most {MAX_KEY_LENGTH} are allowed: shorten the ids")

    def __str__(self) -> str:
        return f"{self.run_id}/{self.trajectory_id}/{self.generation}/{self.turn}/{self.ordinal}"

    @classmethod
    def parse(cls, text: str) -> CallKey:
        """Raises InvalidKey (a ValueError) with one sentence where the text is not a key."""
        if len(text) > MAX_KEY_LENGTH:
            raise InvalidKey(f"the key has {len(text)} characters, at most {MAX_KEY_LENGTH} are allowed")
        parts = text.split("/")
        if len(parts) != 5:
            raise InvalidKey(
                f"{_short(text)} is not a call key: it has {len(parts)} parts, "
                "a key is run/trajectory/generation/turn/ordinal"
            )
        numbers = []
        for name, part in zip(("generation", "turn", "ordinal"), parts[2:], strict=True):
            if not _NUMBER.fullmatch(part):
                raise InvalidKey(f"{_short(text)} is not a call key: its {name} {_short(part)} is not a plain number")
            numbers.append(int(part))
        return cls(parts[0], parts[1], *numbers)


def args_sha256(args_json: bytes) -> bytes:
    """The digest that tells two uses of one key apart: of the bytes exactly as the model spelled them."""
    return hashlib.sha256(args_json).digest()
