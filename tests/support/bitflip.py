"""Flips a bit in memory that a vLLM worker computes with. Sent to the worker by `collective_rpc`."""

from __future__ import annotations

import ctypes
from typing import Any


def flip_packed_head(worker: Any) -> str:
    """Finds the head's oneDNN-packed weights in this process's memory and flips one bit of them; returns where."""
    from rollout_node.weights.storage import _packed, read_out

    head = worker.model_runner.get_model().lm_head
    (handler,) = (packed for packed in _packed(head) if hasattr(packed, "handler_tensor"))
    weight = head.weight.detach()
    before = read_out(head, handler.k, handler.n, weight.dtype)
    # Packed layouts keep some outputs of one input together; the plain weight keeps inputs of one output together.
    for outputs in (16, 8, 4):
        needle = weight[:outputs, 3].contiguous().numpy().tobytes()
        for address in _find(needle):
            _flip(address)
            if not read_out(head, handler.k, handler.n, weight.dtype).equal(before):
                return f"0x{address:x}"
            _flip(address)
    raise AssertionError("the packed weights of the head were not found in memory")


def flip_embedding(worker: Any) -> str:
    """Flips a low mantissa bit of one weight that no packing hides."""
    weight = worker.model_runner.get_model().model.norm.weight
    _flip(weight.data_ptr())
    return hex(weight.data_ptr())


def _flip(address: int) -> None:
    byte = ctypes.c_ubyte.from_address(address)
    byte.value ^= 1


def _find(needle: bytes) -> list[int]:
    found = []
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            fields = line.split()
            if not fields[1].startswith("rw") or (len(fields) > 5 and fields[5].startswith(("/dev", "[v"))):
                continue
            begin, end = (int(part, 16) for part in fields[0].split("-"))
            step = 64 * 2**20
            for start in range(begin, end, step):
                try:
                    memory.seek(start)
                    chunk = memory.read(min(step + len(needle), end - start))
                except OSError:
                    break
                at = chunk.find(needle)
                while at >= 0:
                    found.append(start + at)
                    at = chunk.find(needle, at + 1)
    return found


def disable_repacking(worker: Any) -> None:
    """Leaves the head's packed copy as vLLM's reload leaves it."""
    worker.worker._fermata_repack_heads = lambda: None


def enable_repacking(worker: Any) -> None:
    del worker.worker._fermata_repack_heads
