"""The folder of one run: made, emptied of an earlier run, and kept by one command at a time.

Invariant: nothing is deleted from a folder that is not a run's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from node_runtime.errors import EXIT_UNAVAILABLE, EXIT_USAGE, NodeError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOCK = ".lock"
# One of these stands in every folder that a run has begun to fill.
_MARKS = frozenset({_LOCK, "fermata.yaml", "summary.json"})


def run_path(runs: Path, name: str) -> Path:
    """Where a run of this name stands; touches nothing. Raises NodeError for a name that cannot be a folder's."""
    if not _NAME.fullmatch(name):
        raise NodeError(
            f"--name {name!r} cannot be a run's: use letters, digits, '.', '_' and '-', at most 64, no mark first",
            EXIT_USAGE,
        )
    return runs / name


@contextlib.contextmanager
def run_folder(runs: Path, name: str) -> Iterator[Path]:
    """Empty, and ours until the block ends: for a run whose settings are known to be right. Raises NodeError."""
    folder = run_path(runs, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = {entry.name for entry in folder.iterdir()}
        if found and not found & _MARKS:
            raise NodeError(
                f"{folder} holds files that are not a run's: choose another --name, or move them away", EXIT_USAGE
            )
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise NodeError(
            f"the run folder {folder} cannot be made: {error.strerror or error}; name another with --runs", EXIT_USAGE
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise NodeError(
                f"another run is under way in {folder}: wait for it, or choose another --name", EXIT_UNAVAILABLE
            ) from None
        _empty(folder)
        yield folder
    finally:
        os.close(lock)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name == _LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
