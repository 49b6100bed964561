"""What NVML says of the GPUs of this process, in the units the metrics have.

Owns this process's use of NVML. Invariants: NVML is started by the first reading, never before, and no CUDA context is
made (NVML has none); each question stands for itself: what one GPU or one question does not answer is absent, the rest
is there; every lasting fault is logged once, and once more when it is over.

Used by one thread: a call may hang in the driver for as long as it likes.

Sources: NVIDIA's NVML API Reference. nvmlUtilization_t: per cent of the last sample period, 1/6 s to 1 s, in which a
kernel ran; not supported in MIG mode. nvmlMemory_t (version 1): bytes, `used` holds what the driver reserves, so used
and free make the total and used / total tells how near the end is; whether the `used` of version 2 holds it too,
documents and drivers do not agree. nvmlDeviceGetPowerUsage: milliwatts, a mean over one second since Ampere, except
GA100, which gives the moment. nvmlDeviceGetCount_v2 counts also GPUs that this process may not touch, which CUDA does
not see. nvmlInit and nvmlShutdown count references, so others in this process may use NVML as well.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pynvml  # type: ignore[import-untyped]

from node_runtime.gpu_visible import Gpu, MigDevice, Visible, visible
from node_runtime.logs import get_logger

RETRY_S: Final = 30.0  # from a failed start, or a fault that lasts, to the next start of NVML

log = get_logger("node_runtime.gpu_nvml")


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU now; None is what it does not tell."""

    gpu: str  # CUDA's number of it in this process
    model: str
    utilization_ratio: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    power_watts: float | None


@dataclass(frozen=True, slots=True)
class _Open:
    number: str
    device: Gpu | MigDevice
    handle: Any


class NvmlReader:
    """Reads the GPUs that `environ` leaves to this process."""

    def __init__(self, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._environ = environ
        self._clock = clock
        self._started = False
        self._nothing_to_read = False
        self._retry_at = 0.0
        self._chosen: Visible | None = None  # as CUDA counted at the start, whatever becomes of a GPU later
        self._open: list[_Open] = []
        self._faults: set[str] = set()  # what is at fault and told
        self._told_unclear = False

    def read(self) -> tuple[Reading, ...]:
        """The GPUs of this process; raises nothing of NVML's."""
        if self._started and self._faults and self._clock() >= self._retry_at:
            self.close()  # a GPU that was reset, and a driver that came back, want a new start
        if not self._started and not self._nothing_to_read and self._clock() >= self._retry_at:
            self._start()
        return tuple(map(self._read, self._open))

    def close(self) -> None:
        """Ends this reader's use of NVML until its next reading."""
        self._open = []
        if self._started:
            self._started = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _start(self) -> None:
        self._retry_at = self._clock() + RETRY_S
        try:
            pynvml.nvmlInit()
            self._started = True
            if self._chosen is None or not self._chosen.final:
                self._chosen = self._choose()
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                self._nothing_to_read = True  # it does not come to a process that runs
                log.debug("no GPU metrics: no NVIDIA driver is here")
            else:
                self._fault("NVML", f"no GPU metrics: NVML does not answer ({error})")
            return
        self._over("NVML", "GPU metrics: NVML answers now")
        if self._chosen.final and not self._chosen.devices:
            self._nothing_to_read = True
            log.debug("no GPU metrics: this process may use no GPU")
            self.close()
            return
        for number, device in enumerate(self._chosen.devices):
            if device is not None:
                self._open_device(str(number), device)

    def _choose(self) -> Visible:
        """All GPUs are listed, and those of this process kept."""
        driver = pynvml.nvmlSystemGetDriverVersion().split(".")[0]
        gpus: list[Gpu | None] = []
        silent: list[str] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)))
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_NO_PERMISSION:
                    gpus.append(None)
                    silent.append(f"{index} ({error})")
        chosen = visible(gpus, self._environ, driver=int(driver) if driver.isdigit() else 0)
        if chosen.final:
            self._over("list", "the GPUs of this process could be listed now")
        else:
            self._fault("list", f"no metrics of GPU {', '.join(silent)} of this machine: NVML could not list it")
        if chosen.unclear and not self._told_unclear:
            self._told_unclear = True
            log.warning(chosen.unclear)
        return chosen

    def _open_device(self, number: str, device: Gpu | MigDevice) -> None:
        try:
            self._open.append(_Open(number, device, pynvml.nvmlDeviceGetHandleByUUID(device.uuid)))
        except pynvml.NVMLError as error:
            self._device_fault(number, device, error)

    def _read(self, gpu: _Open) -> Reading:
        faults: list[pynvml.NVMLError] = []

        def ask(question: Callable[[Any], Any]) -> Any:
            try:
                return question(gpu.handle)
            except pynvml.NVMLError as error:
                if not _is_unsupported(error, gpu.device):
                    faults.append(error)
                return None

        utilization = ask(pynvml.nvmlDeviceGetUtilizationRates)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
        power = ask(pynvml.nvmlDeviceGetPowerUsage)
        if faults:
            self._device_fault(gpu.number, gpu.device, faults[0])
        else:
            self._over(gpu.number, f"GPU {gpu.number} ({gpu.device.model}) answers again")
        return Reading(
            gpu=gpu.number,
            model=gpu.device.model,
            utilization_ratio=None if utilization is None else utilization.gpu / 100,
            memory_used_bytes=None if memory is None else float(memory.used),
            memory_total_bytes=None if memory is None else float(memory.total),
            power_watts=None if power is None else power / 1000,
        )

    def _device_fault(self, number: str, device: Gpu | MigDevice, error: pynvml.NVMLError) -> None:
        self._fault(number, f"GPU {number} ({device.model}): what it does not answer is left out ({error})")

    def _fault(self, what: str, sentence: str) -> None:
        if not self._faults:
            self._retry_at = self._clock() + RETRY_S
        if what not in self._faults:
            self._faults.add(what)
            log.warning(sentence)

    def _over(self, what: str, sentence: str) -> None:
        if what in self._faults:
            self._faults.remove(what)
            log.info(sentence)


def _gpu(handle: Any) -> Gpu:
    uuid, model = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        current = pynvml.NVML_DEVICE_MIG_DISABLE
    if current == pynvml.NVML_DEVICE_MIG_DISABLE:
        return Gpu(uuid, model)
    return Gpu(uuid, model, tuple(_mig_devices(handle)))


def _mig_devices(handle: Any) -> Iterator[MigDevice]:
    """Those this process may touch: a container sees its own alone."""
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_NoPermission):
            continue
        yield MigDevice(
            uuid=pynvml.nvmlDeviceGetUUID(mig),
            model=pynvml.nvmlDeviceGetName(mig),
            gpu_instance=pynvml.nvmlDeviceGetGpuInstanceId(mig),
            compute_instance=pynvml.nvmlDeviceGetComputeInstanceId(mig),
        )


def _is_unsupported(error: pynvml.NVMLError, device: Gpu | MigDevice) -> bool:
    """The question has no answer on this device, ever: nothing is wrong."""
    if isinstance(device, MigDevice) and error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:
        return True  # some questions take handles of whole GPUs alone
    return error.value in (
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
    )
