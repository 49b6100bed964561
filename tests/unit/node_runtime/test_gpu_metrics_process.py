"""GPU metrics in processes of their own, with NVML where the loader looks and without; the recorder of answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.nvml import A100_MIG, LIBRARY, TWO_H100, Playback, build, error, load, recorded_nvml

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys, prometheus_client
from node_runtime import logs
from node_runtime.gpu_metrics import GpuMetrics
from node_runtime.runtime_settings import RuntimeSettings
logs.configure(RuntimeSettings(log_level="debug"), "rollout_node")
gpus = GpuMetrics("fermata_rollout", wait_s=30.0)
gpus.start()
for _ in range(3):
    page = prometheus_client.generate_latest().decode()
gpus.stop()
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(page, *sorted(mapped), sep="\\n")
"""


def run(*command: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**environ, **env}, capture_output=True, text=True, timeout=50
    )


@pytest.fixture
def without_nvml(tmp_path: Path) -> dict[str, str]:
    """The loader finds no NVML, also where a driver is installed: one that is no library comes first."""
    (tmp_path / LIBRARY).write_bytes(b"")
    return {"LD_LIBRARY_PATH": str(tmp_path)}


def test_without_a_driver_the_page_has_no_gpu_and_nothing_is_wrong(without_nvml: dict[str, str]) -> None:
    done = run("-c", PROGRAM, env=without_nvml)
    assert done.returncode == 0, done.stderr
    assert "process_resident_memory_bytes" in done.stdout
    assert "_gpu_" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert "debug" in line
    assert "no GPU metrics: no NVIDIA driver is here" in line


def test_a_driver_is_not_looked_for_again(without_nvml: dict[str, str]) -> None:
    program = """
from node_runtime import logs
from node_runtime.gpu_nvml import NvmlReader
from node_runtime.runtime_settings import RuntimeSettings
logs.configure(RuntimeSettings(log_level="debug"), "rollout_node")
hours = iter(range(0, 100 * 3600, 3600))
reader = NvmlReader({}, clock=lambda: float(next(hours)))
print([reader.read() for _ in range(3)])
"""
    done = run("-c", program, env=without_nvml)
    assert done.stdout == "[(), (), ()]\n", done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nvml_is_found_where_the_loader_looks_and_cuda_is_not_touched(nvml_library: Path, tmp_path: Path) -> None:
    playback = Playback(nvml_library, tmp_path, load(TWO_H100))
    done = run("-c", PROGRAM, env=playback.environment())
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^fermata_rollout_gpu_\w+\{", done.stdout, flags=re.MULTILINE)) == 8
    assert str(nvml_library) in done.stdout
    assert "libcuda" not in done.stdout
    assert done.stderr == ""
    assert playback.calls("nvmlInitWithFlags") == playback.calls("nvmlShutdown") == ["-"]


@pytest.mark.parametrize("recording", [TWO_H100, A100_MIG], ids=lambda path: path.stem)
def test_recording_what_is_played_back_gives_the_recording(nvml_library: Path, tmp_path: Path, recording: Path) -> None:
    playback = Playback(nvml_library, tmp_path, load(recording))
    done = run("scripts/record_nvml.py", env=playback.environment())
    assert done.returncode == 0, done.stderr
    made, kept = (text.partition("],")[2] for text in (done.stdout, recording.read_text()))  # from the sources on
    assert made == kept
    assert made.count("nvmlDevice") > 10
    (source,) = json.loads(done.stdout)["source"]
    assert source.startswith("scripts/record_nvml.py on 2")


def test_recording_a_lost_gpu(nvml_library: Path, tmp_path: Path) -> None:
    playback = Playback(nvml_library, tmp_path, load(TWO_H100))
    playback.answer("0", "nvmlDeviceGetHandleByIndex_v2", error("NVML_ERROR_GPU_IS_LOST"))
    made = json.loads(run("scripts/record_nvml.py", env=playback.environment()).stdout)
    assert made["0"] == {"nvmlDeviceGetHandleByIndex_v2": {"error": "NVML_ERROR_GPU_IS_LOST"}}
    assert made["1"] == load(TWO_H100)["1"]


def test_recording_needs_nvml(without_nvml: dict[str, str]) -> None:
    done = run("scripts/record_nvml.py", env=without_nvml)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "record_nvml: NVML does not answer (NVML Shared Library Not Found): run it where nvidia-smi lists GPUs\n"
    )


def test_the_playback_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(
        RuntimeError, match=r"^the NVML playback needs a C compiler, and of no-such-compiler none is on PATH:"
    ):
        recorded_nvml(tmp_path)
    monkeypatch.setenv("CC", "false")
    with pytest.raises(RuntimeError, match="could not make the NVML playback cleanly"):
        build(tmp_path)
