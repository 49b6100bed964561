"""Runs `fermata demo` for three seeds and writes what each measured to bench/results/demo.json.

    python bench/demo_seeds.py [--seeds 0 1 2] [--runs runs/bench] [-- further flags of fermata demo]

Exit code 1 where a run misses what the demo promises (see `BOUNDS`); the figures are written all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "demo.json"
GIB = 2**30

# What the demo promises: figure, how to read it from a summary, and what must hold.
BOUNDS: tuple[tuple[str, Callable[[dict[str, Any]], float], Callable[[float], bool]], ...] = (
    ("accuracy_before <= 0.4", lambda run: run["accuracy_before"], lambda value: value <= 0.4),
    ("accuracy_after >= 0.9", lambda run: run["accuracy_after"], lambda value: value >= 0.9),
    ("accuracy_without_tools <= 0.1", lambda run: run["accuracy_without_tools"], lambda value: value <= 0.1),
    ("training under 180 s", lambda run: run["seconds"]["training"], lambda value: value < 180),
    ("in all under 360 s", lambda run: run["seconds"]["total"], lambda value: value < 360),
    ("peak memory under 10 GiB", lambda run: run["peak_rss_bytes"] / GIB, lambda value: value < 10),
    ("no call lost", lambda run: run["calls_lost"], lambda value: value == 0),
    ("checksums equal", lambda run: run["checksums_verified"]["equal"], bool),
    ("logprob_diff_mean <= 1e-4", lambda run: run["logprob_diff_mean"], lambda value: value <= 1e-4),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench", help="folder of the runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file to write")
    parser.add_argument("flags", nargs="*", help="further flags of fermata demo, after --")
    options = parser.parse_args()
    runs, missed = [], []
    for seed in options.seeds:
        run = run_demo(seed, options.runs, options.flags)
        broken = [name for name, read, holds in BOUNDS if not holds(read(run["summary"]))]
        runs.append(run | {"missed": broken})
        missed += [f"seed {seed}: {name}" for name in broken]
        write(options.out, options.seeds, options.flags, runs)  # a later run that fails costs no figures
    for line in missed:
        print(f"missed, {line}", file=sys.stderr)
    print(options.out)
    return 1 if missed else 0


def run_demo(seed: int, runs: Path, flags: Sequence[str]) -> dict[str, Any]:
    """One run's command, load of the machine and summary. Ends the program where the demo fails."""
    name = f"seed-{seed}"
    arguments = ["demo", "--seed", str(seed), "--name", name, "--runs", str(runs), *flags]
    print(f"bench: fermata {shlex.join(arguments)}", file=sys.stderr)
    load_before = os.getloadavg()[0]
    begun = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "fermata_cli", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"bench: the run of seed {seed} ended with exit code {done.returncode}")
    summary = json.loads((runs / name / "summary.json").read_text())
    return {
        "seed": seed,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
        "load_average": {"before": round(load_before, 2), "after": round(os.getloadavg()[0], 2)},
        "summary": summary,
    }


def write(path: Path, seeds: Sequence[int], flags: Sequence[str], runs: Sequence[dict[str, Any]]) -> None:
    words = ["python", "bench/demo_seeds.py", "--seeds", *map(str, seeds), *(["--", *flags] if flags else [])]
    result = {"command": shlex.join(words), "machine": machine(), "runs": list(runs)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "python": platform.python_version(),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
