"""The live view on a real terminal (a pseudo-terminal), and Ctrl-C as that terminal sends it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from fermata_cli import proc
from tests.integration.cluster.processes import REPOSITORY, cluster_of, sets

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def test_the_panel_is_drawn_and_ctrl_c_of_the_terminal_stops_all_in_order(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    flags = sets("cluster.stop_grace_s=5")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FERMATA_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "fermata_cli", "demo", "--runs", str(tmp_path), *flags],
        cwd=REPOSITORY,
        env=clean | {"TERM": "xterm-256color"},
        preexec_fn=lambda: os.login_tty(theirs),
    )
    os.close(theirs)
    try:
        shown = read_until(ours, b"starting the engine", 90)
        pids = [row["pid"] for row in cluster_of(tmp_path / "demo").values()]
        assert len(pids) == 3
        assert "╭─ fermata · starting the cluster".encode() in shown
        os.write(ours, b"\x03")
        shown = read_until(ours, b"written: ", 60)
        assert b"SIGINT: stopping everything in order" in shown
        assert process.wait(30) == 130
        alive = proc.snapshot()
        assert [pid for pid in pids if pid in alive and alive[pid].alive] == []
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        os.close(ours)


def read_until(terminal: int, words: bytes, within_s: float) -> bytes:
    """What the terminal was sent, up to `words`."""
    shown, deadline = b"", time.monotonic() + within_s
    while words not in shown:
        left = deadline - time.monotonic()
        assert left > 0, f"{words!r} was not shown: {shown[-2000:]!r}"
        if select.select([terminal], [], [], left)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                raise AssertionError(f"it ended before {words!r}: {shown[-2000:]!r}") from None
    return shown
