"""Which GPUs are a process's own: CUDA's rules for CUDA_VISIBLE_DEVICES, on lists of GPUs."""

from __future__ import annotations

import pytest

from node_runtime.gpu_visible import Gpu, MigDevice, visible

A = Gpu("GPU-aaaa1111-0000-0000-0000-000000000000", "H100")
B = Gpu("GPU-aaaa2222-0000-0000-0000-000000000000", "H100")
C = Gpu("GPU-cccc3333-0000-0000-0000-000000000000", "H100")
L4 = Gpu("GPU-dddd4444-0000-0000-0000-000000000000", "L4")
M30 = MigDevice("MIG-3333aaaa-0000-0000-0000-000000000000", "H100 MIG 1c.3g.40gb", 3, 0)
M31 = MigDevice("MIG-3333bbbb-0000-0000-0000-000000000000", "H100 MIG 1c.3g.40gb", 3, 1)
M40 = MigDevice("MIG-4444cccc-0000-0000-0000-000000000000", "H100 MIG 1g.10gb", 4, 0)
SLICED = Gpu("GPU-eeee5555-0000-0000-0000-000000000000", "H100", (M30, M31, M40))
EMPTY = Gpu("GPU-ffff6666-0000-0000-0000-000000000000", "H100", ())

NEW, OLD = 570, 550


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [A, B, C]),
        ("0", [A]),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        ("1gpu2,2ampere", [B, C]),  # what begins with digits is a number
        ("+1", [B]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        ("1" * 5000, []),
        ("\N{ARABIC-INDIC DIGIT ONE}", []),
        ("0,2,-1,1", [A, C]),  # the guide's own example
        ("0,7,1", [A]),
        ("0,,1", [A]),
        ("0,x,1", [A]),
        ("0,GPU-cccc3333,1", [A]),  # the first entry says which kind all are
        ("0,1,0", []),  # given twice: nothing
        (A.uuid, [A]),
        (f"{C.uuid},{A.uuid}", [C, A]),
        ("GPU-cccc,GPU-aaaa1", [C, A]),
        ("GPU-aaaa", []),  # the beginning of two
        ("GPU-cccc,GPU-aaaa,GPU-aaaa1", [C]),
        ("GPU-cccc,GPU-0000,GPU-aaaa1", [C]),
        ("GPU-cccc,0", [C]),
        ("GPU-cccc,GPU-cc", []),
        ("MIG-3333aaaa", []),  # no GPU is in MIG mode
    ],
)
def test_whole_gpus(value: str | None, expected: list[Gpu]) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    shown = visible([A, B, C], environ, driver=NEW)
    assert (list(shown.devices), shown.final, shown.unclear) == (expected, True, "")


@pytest.mark.parametrize(
    ("value", "driver", "expected"),
    [
        (None, NEW, [A, M30, M40, B]),  # one compute instance of each GPU instance
        (None, OLD, [M30]),  # one in all, and then no whole GPU
        ("1", NEW, [M30, M40]),
        ("1", OLD, [M30]),
        ("0", OLD, [A]),
        ("2,1", NEW, [B, M30, M40]),
        ("3", NEW, []),  # in MIG mode without a MIG device
        (SLICED.uuid, NEW, [M30, M40]),
        (M31.uuid, NEW, [M31]),
        (f"{M40.uuid},{M31.uuid}", NEW, [M40, M31]),
        (f"{M40.uuid},{M31.uuid}", OLD, [M40]),
        (f"{M31.uuid},{M30.uuid}", NEW, [M31]),  # of the same GPU instance: one
        ("MIG-3333b", NEW, [M31]),
        ("MIG-3333", NEW, []),
        (f"{B.uuid},{M40.uuid}", NEW, [B, M40]),
        (f"MIG-{SLICED.uuid}/4/0", OLD, [M40]),  # as drivers before R470 wrote it
        (f"MIG-{SLICED.uuid}/4/1", OLD, []),
    ],
)
def test_mig_devices(value: str | None, driver: int, expected: list[Gpu | MigDevice]) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert list(visible([A, SLICED, B, EMPTY], environ, driver=driver).devices) == expected


@pytest.mark.parametrize(
    ("value", "expected", "final"),
    [
        (None, [A, None, C], False),
        ("2", [C], True),  # the one out of reach is none of ours
        ("2,1", [C, None], False),
        ("GPU-cccc", [C], True),
        ("GPU-bbbb,GPU-cccc", [], False),  # may be the one out of reach
    ],
)
def test_a_gpu_out_of_reach_keeps_its_number(value: str | None, expected: list[Gpu | None], final: bool) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    shown = visible([A, None, C], environ, driver=NEW)
    assert (list(shown.devices), shown.final) == (expected, final)


def test_numbers_of_different_models_mean_what_cuda_means_or_nothing() -> None:
    """CUDA counts the fastest first unless told otherwise, NVML by address."""
    numbered = visible([L4, A], {"CUDA_VISIBLE_DEVICES": "0"}, driver=NEW)
    assert numbered.devices == ()
    assert "CUDA_DEVICE_ORDER is FASTEST_FIRST" in numbered.unclear
    assert "CUDA_VISIBLE_DEVICES=0 may mean others: no GPU is shown" in numbered.unclear
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID in CUDA_VISIBLE_DEVICES" in numbered.unclear

    ordered = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible([L4, A], ordered, driver=NEW).devices == (L4,)
    assert visible([L4, A], ordered, driver=NEW).unclear == ""
    assert visible([L4, A], {"CUDA_VISIBLE_DEVICES": A.uuid}, driver=NEW).devices == (A,)

    all_of_them = visible([L4, A], {}, driver=NEW)
    assert all_of_them.devices == (L4, A)
    assert "in another order than the metrics do" in all_of_them.unclear
    assert visible([L4, A], {"CUDA_VISIBLE_DEVICES": "-1"}, driver=NEW).unclear == ""


def test_no_gpus() -> None:
    for value in (None, "0", "GPU-aaaa"):
        environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        assert visible([], environ, driver=0).devices == ()
