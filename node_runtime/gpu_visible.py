"""Which of the machine's GPUs this process may use, as CUDA would count them, without asking CUDA.

Owns the reading of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. Pure: NVML's list of GPUs goes in, devices come out.
Invariant: a device that CUDA would not show to this process is never chosen; where that cannot be known, none is.

Sources: "CUDA Environment Variables" in the CUDA Programming Guide (indices, UUIDs and their beginnings, the first
invalid entry ends the list, an empty value hides all, FASTEST_FIRST is the default order); "CUDA Device Enumeration" in
the Multi-Instance GPU User Guide (names of MIG devices, one compute instance per GPU instance, one in all before driver
R570); for what those leave open (what begins with digits counts as a number, an entry given twice leaves nothing)
`torch.cuda._parse_visible_devices` of PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_MANY_MIG_DEVICES: Final = 570  # from this driver on a process sees more than one MIG device


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A compute instance of a GPU in MIG mode."""

    uuid: str  # MIG-…
    model: str
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as NVML lists it; in MIG mode CUDA sees its MIG devices in its place, and nothing where it has none."""

    uuid: str  # GPU-…
    model: str
    mig: tuple[MigDevice, ...] | None = None  # None: not in MIG mode


@dataclass(frozen=True, slots=True)
class Visible:
    """`devices` by CUDA's number; None where the GPU of that number cannot be reached now."""

    devices: tuple[Gpu | MigDevice | None, ...]
    final: bool = True  # False: a GPU out of reach may be one of them
    unclear: str = ""  # or a sentence: what could not be known, and what would make it clear


def visible(gpus: Sequence[Gpu | None], environ: Mapping[str, str], *, driver: int) -> Visible:
    """The devices of this process. `gpus`: all, in NVML's order, which is that of PCI addresses; None: out of reach.

    `driver` is the major version of the driver.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    by_name = value is not None and value.strip().startswith(("GPU-", "MIG-"))
    chosen = list(gpus) if value is None else _named(value, gpus) if by_name else _numbered(value, gpus)
    devices = _without_second_instances(
        [device for gpu in chosen for device in _shown_for(gpu)], gpus, single=driver < _MANY_MIG_DEVICES
    )
    found_all = by_name and value is not None and len(chosen) == len(value.split(","))
    final = found_all or None not in (gpus if by_name else devices)
    order = environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST").strip()
    if by_name or not devices or order == "PCI_BUS_ID" or len({gpu.model for gpu in gpus if gpu is not None}) < 2:
        return Visible(devices, final)  # GPUs of one model are equally fast: CUDA counts them by PCI address too
    advice = "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID in CUDA_VISIBLE_DEVICES"
    why = f"the GPUs are of several models and CUDA_DEVICE_ORDER is {order}, so CUDA may count them in another order"
    if value is None:  # all are this process's own, whatever their numbers
        return Visible(devices, final, f"{why} than the metrics do: {advice}")
    return Visible((), final, f"{why} and CUDA_VISIBLE_DEVICES={value} may mean others: no GPU is shown; {advice}")


def _numbered(value: str, gpus: Sequence[Gpu | None]) -> list[Gpu | MigDevice | None]:
    """Up to the first entry that is no index of a GPU; nothing where one is given twice."""
    indices: list[int] = []
    for entry in value.split(","):
        digits = re.match(r"[+-]?[0-9]{1,18}", entry.strip())  # of more, the first are too many GPUs already
        index = int(digits.group()) if digits else -1
        if index in indices:
            return []
        if not 0 <= index < len(gpus):
            break
        indices.append(index)
    return [gpus[index] for index in indices]


def _named(value: str, gpus: Sequence[Gpu | None]) -> list[Gpu | MigDevice | None]:
    """Up to the first entry that is not the beginning of exactly one UUID; nothing where one is given twice."""
    chosen: list[Gpu | MigDevice | None] = []
    for entry in value.split(","):
        found = [device for gpu in gpus if gpu is not None for device in _with_name(entry.strip(), gpu)]
        if len(found) != 1:
            break
        if found[0] in chosen:
            return []
        chosen.append(found[0])
    return chosen


def _with_name(name: str, gpu: Gpu) -> list[Gpu | MigDevice]:
    if name.startswith("MIG-"):
        # Drivers before R470 wrote MIG-<UUID of the GPU>/<GPU instance>/<compute instance>, which is still read.
        return [
            device
            for device in gpu.mig or ()
            if device.uuid.startswith(name) or name == f"MIG-{gpu.uuid}/{device.gpu_instance}/{device.compute_instance}"
        ]
    return [gpu] if name.startswith("GPU-") and gpu.uuid.startswith(name) else []


def _shown_for(device: Gpu | MigDevice | None) -> Sequence[Gpu | MigDevice | None]:
    return device.mig if isinstance(device, Gpu) and device.mig is not None else (device,)


def _without_second_instances(
    devices: Sequence[Gpu | MigDevice | None], gpus: Sequence[Gpu | None], *, single: bool
) -> tuple[Gpu | MigDevice | None, ...]:
    """CUDA takes one compute instance of each GPU instance; an older driver one in all, and then no whole GPU."""
    parents = {mig.uuid: gpu.uuid for gpu in gpus if gpu is not None for mig in gpu.mig or ()}
    kept: dict[object, Gpu | MigDevice | None] = {}
    for position, device in enumerate(devices):
        if isinstance(device, MigDevice):
            if single:
                return (device,)
            kept.setdefault((parents[device.uuid], device.gpu_instance), device)
        else:
            kept[position] = device
    return tuple(kept.values())
