#!/usr/bin/env python
"""Record what NVML answers on this machine, for tests to play back (tests/support/nvml/).

    .venv/bin/python scripts/record_nvml.py > tests/support/nvml/recordings/NAME.json

Asks once what the GPU metrics ask, of every GPU and MIG device, through nvidia-ml-py. Answers are recorded as NVML
gives them: milliwatts, per cent, bytes; an error by its name. The GPUs' UUIDs are among them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

Answer = Any
Questions = dict[str, Callable[[Any], Answer]]

OF_ANY: Questions = {
    "nvmlDeviceGetUtilizationRates": lambda device: _fields(pynvml.nvmlDeviceGetUtilizationRates(device)),
    "nvmlDeviceGetMemoryInfo": lambda device: _fields(pynvml.nvmlDeviceGetMemoryInfo(device)),
    "nvmlDeviceGetPowerUsage": pynvml.nvmlDeviceGetPowerUsage,
}
OF_GPU: Questions = {
    "nvmlDeviceGetUUID": pynvml.nvmlDeviceGetUUID,
    "nvmlDeviceGetName": pynvml.nvmlDeviceGetName,
    "nvmlDeviceGetMigMode": pynvml.nvmlDeviceGetMigMode,
    "nvmlDeviceGetMaxMigDeviceCount": pynvml.nvmlDeviceGetMaxMigDeviceCount,
    **OF_ANY,
}
OF_MIG: Questions = {
    "nvmlDeviceGetUUID": pynvml.nvmlDeviceGetUUID,
    "nvmlDeviceGetName": pynvml.nvmlDeviceGetName,
    "nvmlDeviceGetGpuInstanceId": pynvml.nvmlDeviceGetGpuInstanceId,
    "nvmlDeviceGetComputeInstanceId": pynvml.nvmlDeviceGetComputeInstanceId,
    **OF_ANY,
}


def record() -> dict[str, Any]:
    """All answers by device: "-" is NVML itself, "0" a GPU, "0/1" a MIG device of it. Raises NVMLError without NVML."""
    pynvml.nvmlInit()
    try:
        count = pynvml.nvmlDeviceGetCount()
        recording: dict[str, Any] = {
            "source": [f"scripts/record_nvml.py on {datetime.date.today().isoformat()}"],
            "-": {"nvmlSystemGetDriverVersion": pynvml.nvmlSystemGetDriverVersion(), "nvmlDeviceGetCount_v2": count},
        }
        for index in range(count):
            _record_gpu(index, recording)
        return recording
    finally:
        pynvml.nvmlShutdown()


def _record_gpu(index: int, recording: dict[str, Any]) -> None:
    gpu = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if isinstance(gpu, dict):
        recording[str(index)] = {"nvmlDeviceGetHandleByIndex_v2": gpu}
        return
    answers = recording[str(index)] = _answers(OF_GPU, gpu)
    migs = answers["nvmlDeviceGetMaxMigDeviceCount"]
    for number in range(migs if isinstance(migs, int) else 0):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
        except pynvml.NVMLError_NotFound:
            continue
        recording[f"{index}/{number}"] = _answers(OF_MIG, mig)


def _answers(questions: Questions, device: Any) -> dict[str, Answer]:
    return {name: _ask(question, device) for name, question in questions.items()}


def _ask(question: Callable[[Any], Answer], argument: Any) -> Answer:
    try:
        return question(argument)
    except pynvml.NVMLError as error:
        return {"error": _name_of(error.value)}


def _name_of(code: int) -> str:
    return next(name for name in dir(pynvml) if name.startswith("NVML_ERROR_") and getattr(pynvml, name) == code)


def _fields(structure: Any) -> list[int]:
    """In the order of the C structure."""
    return [getattr(structure, name) for name, _type in structure._fields_]


def _as_json(recording: dict[str, Any]) -> str:
    """A line per answer, so that two recordings compare by eye."""
    blocks = []
    for device, answers in recording.items():
        if isinstance(answers, dict):
            lines = [f"    {json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items()]
            blocks.append(f"  {json.dumps(device)}: {{\n" + ",\n".join(lines) + "\n  }")
        else:
            lines = [f"    {json.dumps(line)}" for line in answers]
            blocks.append(f"  {json.dumps(device)}: [\n" + ",\n".join(lines) + "\n  ]")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    try:
        recording = record()
    except pynvml.NVMLError as error:
        print(f"record_nvml: NVML does not answer ({error}): run it where nvidia-smi lists GPUs", file=sys.stderr)
        return 3
    sys.stdout.write(_as_json(recording))
    return 0


if __name__ == "__main__":
    sys.exit(main())
