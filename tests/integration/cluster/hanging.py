"""A module of tools whose import never ends and that takes no SIGTERM."""

from __future__ import annotations

import signal
import sys
import threading

signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stderr.write("hanging\n")
sys.stderr.flush()
threading.Event().wait()
