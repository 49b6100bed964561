"""A recorded NVML answer, played back through the real nvidia-ml-py binding.

Owns a libnvidia-ml.so.1 of our own that answers from a recording (playback.c), found by the dynamic loader where
LD_LIBRARY_PATH names its folder: what asks NVML notices nothing, and every structure really crosses into C and back.

    subprocess.run([...], env={**os.environ, **recorded_nvml(folder)})

vLLM for CPUs asks the same library, and stays on the CPU: its platform wants NVML and a build for CUDA.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pynvml

LIBRARY: Final = "libnvidia-ml.so.1"
_HERE: Final = Path(__file__).parent
TWO_H100: Final = _HERE / "recordings" / "two_h100.json"
A100_MIG: Final = _HERE / "recordings" / "a100_mig.json"
HANG: Final = {"hang": True}  # as an answer: the call returns once the recording is replaced

Recording = dict[str, Any]


def build(folder: Path) -> Path:
    """Compiles the library into `folder` (created where missing), half a second; returns its path.

    Raises RuntimeError with one sentence where no C compiler is found or it refuses.
    """
    wanted = os.environ.get("CC")
    compilers = [wanted] if wanted else ["cc", "gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        raise RuntimeError(
            f"the NVML playback needs a C compiler, and of {', '.join(compilers)} none is on PATH: "
            "install one (Debian: gcc and libc6-dev) or name it in CC"
        )
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / LIBRARY
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", f"-Wl,-soname,{LIBRARY}", "-o", str(library)]
    done = subprocess.run(
        [*command, str(_HERE / "playback.c")], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0 or done.stderr:
        raise RuntimeError(f"{compiler} could not make the NVML playback cleanly: {done.stderr.strip()}")
    return library


def recorded_nvml(folder: Path, recording: Path = TWO_H100) -> dict[str, str]:
    """What to add to a process's environment, so that NVML answers it as recorded; the library lies in `folder`."""
    return Playback(build(folder), folder, load(recording)).environment()


def load(recording: Path) -> Recording:
    """A recording to alter and play."""
    loaded: Recording = json.loads(recording.read_text(encoding="utf-8"))
    return loaded


def error(name: str) -> dict[str, str]:
    """As an answer: the call fails with it, for instance NVML_ERROR_GPU_IS_LOST."""
    return {"error": name}


class Playback:
    """One recording at a time, for all processes that have `environment()`."""

    def __init__(self, library: Path, folder: Path, recording: Recording) -> None:
        """The recording, and a line per call made, lie in `folder`."""
        self._library = library
        self._text = folder / "nvml.txt"
        self._calls = folder / "nvml.calls"
        self.play(recording)

    def play(self, recording: Recording) -> None:
        """From now on this is what NVML answers."""
        self._recording = copy.deepcopy(recording)
        fresh = self._text.with_suffix(".new")
        fresh.write_text("".join(_lines(self._recording)), encoding="utf-8")
        fresh.replace(self._text)  # whole, for calls that read it meanwhile

    def answer(self, device: str, function: str, answer: Any) -> None:
        """Changes one answer of what is played; `device` is "-" for NVML itself, "0" for a GPU, "0/1" for MIG."""
        self._recording.setdefault(device, {})[function] = answer
        self.play(self._recording)

    def calls(self, function: str) -> list[str]:
        """The devices for which the function was called so far, in order, by all processes."""
        lines = self._calls.read_text(encoding="utf-8").splitlines() if self._calls.exists() else []
        return [device for called, device in map(str.split, lines) if called == function]

    def variables(self) -> dict[str, str]:
        """What the library reads."""
        return {"NVML_PLAYBACK": str(self._text), "NVML_PLAYBACK_CALLS": str(self._calls)}

    def environment(self) -> dict[str, str]:
        """What to add to a process's environment, so that its NVML is this one."""
        before = os.environ.get("LD_LIBRARY_PATH")
        folders = [str(self._library.parent), *([before] if before else [])]
        return {"LD_LIBRARY_PATH": os.pathsep.join(folders), **self.variables()}

    def load_here(self) -> None:
        """For this process, which the loader's path no longer reaches: by its soname the library is found loaded."""
        ctypes.CDLL(str(self._library), mode=ctypes.RTLD_GLOBAL)


def _lines(recording: Recording) -> list[str]:
    return [
        f"{function} {device} {_code_and_values(answer)}\n"
        for device, answers in recording.items()
        if device != "source"
        for function, answer in answers.items()
    ]


def _code_and_values(answer: Any) -> str:
    if answer == HANG:
        return "hang"
    if isinstance(answer, dict):
        return str(int(getattr(pynvml, answer["error"])))
    values = answer if isinstance(answer, list) else [answer]
    return " ".join(["0", *map(str, values)])
