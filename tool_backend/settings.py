"""The ``backend`` section of the settings. Importable without anything that a tool may need."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import pydantic

from node_runtime.settings import Section

_LONGEST_S = 365 * 86_400.0


class DelaySettings(Section):
    """Calls made slow on purpose, for demos and tests: which ones and for how long follows from a hash of the key."""

    share: float = pydantic.Field(default=0.0, ge=0.0, le=1.0, description="part of all calls that is delayed")
    seconds: tuple[float, float] = pydantic.Field(
        default=(0.0, 0.0), description="shortest and longest delay, in seconds"
    )

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Self:
        shortest, longest = self.seconds
        if not 0.0 <= shortest <= longest <= 3600.0:
            raise ValueError(f"seconds must be [shortest, longest] from 0 to 3600, got [{shortest}, {longest}]")
        return self


class JournalSettings(Section):
    """Bounds of the journal of keys."""

    retention_s: float = pydantic.Field(
        default=600.0, gt=0, le=_LONGEST_S, description="how long a finished key's result is kept"
    )
    mark_retention_s: float = pydantic.Field(
        default=86_400.0, gt=0, le=_LONGEST_S, description="how long it is remembered that a key was here"
    )
    max_entries: int = pydantic.Field(default=50_000, ge=1, description="running and finished keys at once")
    max_bytes: int = pydantic.Field(default=64 * 1024 * 1024, ge=0, description="bytes of results kept")
    max_marks: int = pydantic.Field(default=1_000_000, ge=1, description="keys remembered without their result")


class CalculatorSettings(Section):
    """The built-in tool ``calculator``."""

    max_operators: int | None = pydantic.Field(default=None, ge=0, description="operators allowed in one expression")


class SearchSettings(Section):
    """The built-in tool ``search``."""

    corpus: Path | None = pydantic.Field(default=None, description="JSON Lines of documents: id, title, text")
    top_k: int = pydantic.Field(default=3, ge=1, le=20, description="hits where the call asks for no number")


class BackendSettings(Section):
    """A tool backend process."""

    host: str = pydantic.Field(default="127.0.0.1", description="address the backend listens on")
    port: int = pydantic.Field(default=7020, ge=0, le=65535, description="port the backend listens on; 0: a free one")
    threads: int = pydantic.Field(default=64, ge=1, le=4096, description="sync tools that may run at once")
    journal: JournalSettings = pydantic.Field(default_factory=JournalSettings)
    delay: DelaySettings = pydantic.Field(default_factory=DelaySettings)
    calculator: CalculatorSettings = pydantic.Field(default_factory=CalculatorSettings)
    search: SearchSettings = pydantic.Field(default_factory=SearchSettings)
