"""Processes as Linux's /proc shows them: who belongs to whom, and how much memory each has had.

Invariant: a process that ends while it is looked at is left out, never an error. Elsewhere than on Linux there is
nothing to see: lists are empty and figures are None.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

_PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    group: int
    state: str  # "R", "S", ...; "Z": ended, not yet fetched by its parent
    rss_bytes: int

    @property
    def alive(self) -> bool:
        return self.state not in ("Z", "X")


def snapshot() -> dict[int, Process]:
    """All processes, by pid."""
    found: dict[int, Process] = {}
    if not _PROC.is_dir():
        return found
    for name in os.listdir(_PROC):
        if name.isdigit():
            try:
                text = (_PROC / name / "stat").read_text(errors="replace")
            except OSError:
                continue
            # The name, in parentheses, may itself hold spaces and parentheses.
            fields = text.rpartition(")")[2].split()
            found[int(name)] = Process(int(name), int(fields[1]), int(fields[2]), fields[0], int(fields[21]) * _PAGE)
    return found


def tree(root: int, processes: Mapping[int, Process], groups: Iterable[int] = ()) -> list[Process]:
    """The living descendants of `root` and itself, and the members of `groups` (whose parents may be gone)."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    wanted = {process.pid for process in processes.values() if process.group in set(groups)}
    waiting = [root, *wanted]
    while waiting:
        pid = waiting.pop()
        wanted.add(pid)
        waiting.extend(child for child in children.get(pid, ()) if child not in wanted)
    return [processes[pid] for pid in sorted(wanted) if pid in processes and processes[pid].alive]


def group_alive(group: int) -> bool:
    """Whether a process of this group still runs."""
    return any(process.group == group and process.alive for process in snapshot().values())


def high_water_bytes(pid: int) -> int | None:
    """The most memory the process has had resident (VmHWM)."""
    try:
        for line in (_PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None
