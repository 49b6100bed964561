"""What the call ledger costs: a call's life (create, begin, finish, acknowledge) in each store, so many calls at once.

    python bench/ledger.py [--seconds 1.5] [--repeats 5] [--concurrency 1 64 512] [--folder FOLDER]

The control is the same SQLite ledger committing each operation by itself. Repeats of all stores are interleaved; shown
are medians, and the lowest and highest in brackets. Results go to bench/results/ledger.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import shlex
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from fermata.v1 import tool_pb2

from node_runtime.outcomes import make_final
from tool_gateway.ledger import AttemptRecord, CallRecord, Ending, LedgerStore, MemoryLedger, SqliteLedger, group_commit
from tool_gateway.settings import LedgerSettings

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "ledger.json"
OPERATIONS = 5
STORES = ("memory", "sqlite normal", "sqlite full", "each alone, normal", "each alone, full")
MOST_STEPS = group_commit.MAX_STEPS
FINAL = make_final(tool_pb2.OUTCOME_OK, text="x" * 200, started=tool_pb2.STARTED_YES)
MEASURED = f"create, begin, finish ({FINAL.ByteSize()} bytes) and acknowledge"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 512], help="calls at once")
    parser.add_argument("--folder", type=Path, default=None, help="where the files lie while it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file to write")
    options = parser.parse_args()
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    for repeat in range(options.repeats):
        for concurrency in options.concurrency:
            for store in STORES:
                print(f"repeat {repeat + 1} of {options.repeats}: {store}, {concurrency} at once", file=sys.stderr)
                run = uvloop.run(measure(store, concurrency, options.seconds, options.folder))
                runs.setdefault((store, concurrency), []).append(run)
    rows = [summary(store, concurrency, runs) for concurrency in options.concurrency for store in STORES]
    write(options.out, options, rows)
    for row in rows:
        print(line(row))
    print(options.out)
    return 0


@asynccontextmanager
async def opened(store: str, folder: Path | None) -> AsyncIterator[LedgerStore]:
    if store == "memory":
        yield MemoryLedger(LedgerSettings())
        return
    group_commit.MAX_STEPS = 1 if store.startswith("each alone") else MOST_STEPS  # type: ignore[misc]
    synchronous = "full" if store.endswith("full") else "normal"
    with tempfile.TemporaryDirectory(dir=folder) as made:
        async with SqliteLedger(Path(made), LedgerSettings(synchronous=synchronous)) as ledger:
            yield ledger


async def measure(store: str, concurrency: int, seconds: float, folder: Path | None) -> dict[str, float]:
    gc.collect()
    async with opened(store, folder) as ledger:
        latencies: list[float] = []
        began, cpu = time.perf_counter(), time.process_time()
        stop = began + seconds
        await asyncio.gather(*(lives(ledger, f"{worker}", stop, latencies) for worker in range(concurrency)))
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    latencies.sort()
    count = len(latencies)
    return {
        "operations_per_s": OPERATIONS * count / wall,
        "cpu_us_per_operation": cpu / count / OPERATIONS * 1e6,
        "call_p50_ms": latencies[count // 2] * 1e3,
        "call_p99_ms": latencies[int(count * 0.99)] * 1e3,
    }


async def lives(ledger: LedgerStore, trajectory: str, stop: float, latencies: list[float]) -> None:
    """Calls one after the other, each released once it was measured: what is held does not grow."""
    loop, number = asyncio.get_running_loop(), 0
    while (since := time.perf_counter()) < stop:
        key, now = f"run/trajectory-{trajectory}/0/{number}/0", loop.time()
        record = CallRecord(
            key=key,
            run_id="run",
            trajectory_id=f"trajectory-{trajectory}",
            key_generation=0,
            generation=0,
            session_id="node-0-0123456789abcdef",
            tool="search",
            args_sha256=b"d" * 32,
            received_at=now,
            deadline_at=now + 60,
            request_bytes=400,
        )
        await ledger.create(record)
        await ledger.begin_attempt(key, AttemptRecord(1, "backend-0-0123456789abcdef", "10.0.0.1:7020", now))
        await ledger.finish(key, Ending(FINAL, 100, 2000, "backend-0-0123456789abcdef", 1), loop.time())
        await ledger.ack(record.session_id, [key])
        latencies.append(time.perf_counter() - since)
        await ledger.release("run", [key])
        await asyncio.sleep(0)  # the memory store never waits, and would let nobody else run
        number += 1


def summary(store: str, concurrency: int, runs: dict[tuple[str, int], list[dict[str, float]]]) -> dict[str, Any]:
    mine = runs[store, concurrency]
    row: dict[str, Any] = {"store": store, "concurrency": concurrency}
    for figure in mine[0]:
        values = [run[figure] for run in mine]
        row[figure] = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    control = "each alone, full" if store.endswith("full") else "each alone, normal"
    for name, other in (("of_memory", "memory"), ("over_each_alone", control)):
        pairs = zip(mine, runs[other, concurrency], strict=True)
        ratios = [run["operations_per_s"] / beside["operations_per_s"] for run, beside in pairs]
        row[name] = {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    return row


def line(row: dict[str, Any]) -> str:
    def shown(figure: str, digits: int) -> str:
        value = row[figure]
        return f"{value['median']:.{digits}f} [{value['lowest']:.{digits}f}-{value['highest']:.{digits}f}]"

    return (
        f"{row['store']:19} {row['concurrency']:4} at once: {shown('operations_per_s', 0):24} operations/s, "
        f"CPU {shown('cpu_us_per_operation', 1):17} us each, p50 {shown('call_p50_ms', 2):20} "
        f"p99 {shown('call_p99_ms', 2):21} ms a call, {row['of_memory']['median']:.2f} of memory, "
        f"{row['over_each_alone']['median']:.2f} x one commit each"
    )


def write(path: Path, options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    told = {
        "command": shlex.join(["python", "bench/ledger.py", *sys.argv[1:]]),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "sqlite": sqlite3.sqlite_version},
        "operations": f"{MEASURED}, which are the call; a release",
        "seconds": options.seconds,
        "repeats": options.repeats,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
