"""GPU metrics of a recorded NVML: what is shown, what is left out and what is said of it.

NVML's answers come through the real nvidia-ml-py from tests/support/nvml, loaded into this process.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import prometheus_client
import pytest

from fermata_cli.cluster.prometheus_files import SCRAPE_S
from node_runtime.gpu_metrics import WAIT_S, GpuMetrics, LatestReadings
from node_runtime.gpu_nvml import RETRY_S, NvmlReader, Reading
from tests.support.nvml import A100_MIG, HANG, TWO_H100, Playback, Recording, error, load

H100 = "NVIDIA H100 80GB HBM3"
FIRST, SECOND = "GPU-e132d16d-fe10-de80-9b80-63b7f04fbdfd", "GPU-56b50113-2ad5-75f3-d9a8-b7f9e07973c0"
WATTS = {FIRST: 152.0, SECOND: 129.0}
QUESTIONS = {
    "nvmlDeviceGetUtilizationRates": {"utilization_ratio"},
    "nvmlDeviceGetMemoryInfo": {"memory_used_bytes", "memory_total_bytes"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
}
KINDS = {kind for kinds in QUESTIONS.values() for kind in kinds}
Shown = dict[tuple[str, str], float]  # by number and kind


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Playback:
    """Two H100 at first."""
    playback = Playback(nvml_library, tmp_path, load(TWO_H100))
    playback.load_here()
    for name, value in playback.variables().items():
        monkeypatch.setenv(name, value)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return playback


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """Level and sentence of what was logged since the last time it was asked."""
    caplog.set_level(logging.DEBUG)

    def since() -> list[tuple[str, str]]:
        records = [(r.levelname, r.msg["event"]) for r in caplog.records if r.name.startswith("node_runtime.gpu")]
        caplog.clear()
        return records

    return since


def shown(readings: tuple[Reading, ...]) -> Shown:
    kinds = sorted(KINDS)
    values = {(reading.gpu, kind): getattr(reading, kind) for reading in readings for kind in kinds}
    return {key: value for key, value in values.items() if value is not None}


def kinds_of(number: str, readings: tuple[Reading, ...]) -> set[str]:
    return {kind for gpu, kind in shown(readings) if gpu == number}


def watts(readings: tuple[Reading, ...]) -> dict[str, float | None]:
    return {reading.gpu: reading.power_watts for reading in readings}


def with_model(recording: Recording, device: str, model: str) -> Recording:
    recording[device]["nvmlDeviceGetName"] = model
    return recording


def on_page(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(\w+_gpu_\w+\{.*\}) (\S+)$", text, flags=re.MULTILINE)}


# -- units and names --------------------------------------------------------------------------------------------------


def test_the_page_has_ratios_bytes_and_watts_by_number_and_model(nvml: Playback) -> None:
    registry = prometheus_client.CollectorRegistry()
    metrics = GpuMetrics("fermata_rollout", registry=registry, wait_s=30.0)
    metrics.start()
    try:
        page = prometheus_client.generate_latest(registry).decode()
    finally:
        metrics.stop()
    zero, one = (f'{{gpu="{number}",model="{H100}"}}' for number in (0, 1))
    assert on_page(page) == {
        f"fermata_rollout_gpu_utilization_ratio{zero}": 1.0,
        f"fermata_rollout_gpu_utilization_ratio{one}": 0.0,  # measured to be 0: it is there
        f"fermata_rollout_gpu_memory_used_bytes{zero}": 79382839296,
        f"fermata_rollout_gpu_memory_used_bytes{one}": 79380742144,
        f"fermata_rollout_gpu_memory_total_bytes{zero}": 85520809984,
        f"fermata_rollout_gpu_memory_total_bytes{one}": 85520809984,
        f"fermata_rollout_gpu_power_watts{zero}": 152.0,
        f"fermata_rollout_gpu_power_watts{one}": 129.0,
    }
    assert page.count("# TYPE fermata_rollout_gpu_power_watts gauge") == 1


def test_nvml_starts_with_the_first_scrape_and_is_let_go_at_the_end(nvml: Playback) -> None:
    registry = prometheus_client.CollectorRegistry()
    metrics = GpuMetrics("fermata_trainer", registry=registry, wait_s=30.0)
    metrics.stop()  # without effect
    metrics.start()
    assert nvml.calls("nvmlInitWithFlags") == []
    assert on_page(prometheus_client.generate_latest(registry).decode())
    assert (len(nvml.calls("nvmlInitWithFlags")), len(nvml.calls("nvmlShutdown"))) == (1, 0)
    metrics.stop()
    assert (len(nvml.calls("nvmlInitWithFlags")), len(nvml.calls("nvmlShutdown"))) == (1, 1)
    assert prometheus_client.generate_latest(registry).decode() == ""
    metrics.start()  # as before
    assert on_page(prometheus_client.generate_latest(registry).decode())
    metrics.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "gpu-metrics"]


# -- absent, not zero -------------------------------------------------------------------------------------------------


def test_a_driver_that_is_not_loaded_is_told_once_and_tried_again_later(nvml: Playback, said) -> None:
    nvml.answer("-", "nvmlInitWithFlags", error("NVML_ERROR_DRIVER_NOT_LOADED"))
    clock = Clock()
    reader = NvmlReader({}, clock)
    assert [reader.read() for _ in range(3)] == [(), (), ()]
    assert said() == [("WARNING", "no GPU metrics: NVML does not answer (Driver Not Loaded)")]
    assert len(nvml.calls("nvmlInitWithFlags")) == 1
    clock.now += RETRY_S
    assert [reader.read() for _ in range(3)] == [(), (), ()]
    assert len(nvml.calls("nvmlInitWithFlags")) == 2
    assert said() == []
    nvml.play(load(TWO_H100))
    clock.now += RETRY_S
    assert watts(reader.read()) == {"0": 152.0, "1": 129.0}
    assert said() == [("INFO", "GPU metrics: NVML answers now")]
    reader.close()


def test_without_a_gpu_nvml_is_let_go_and_not_asked_again(nvml: Playback, said) -> None:
    nvml.answer("-", "nvmlDeviceGetCount_v2", 0)
    clock = Clock()
    reader = NvmlReader({}, clock)
    for _ in range(3):
        assert reader.read() == ()
        clock.now += RETRY_S
    assert said() == [("DEBUG", "no GPU metrics: this process may use no GPU")]
    assert len(nvml.calls("nvmlInitWithFlags")) == len(nvml.calls("nvmlShutdown")) == 1


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(
    "code", ["NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_NO_PERMISSION", "NVML_ERROR_FUNCTION_NOT_FOUND"]
)
def test_what_a_gpu_does_not_support_is_absent_and_the_rest_is_there(
    nvml: Playback, said, question: str, code: str
) -> None:
    nvml.answer("0", question, error(code))
    reader = NvmlReader({})
    readings = reader.read()
    assert kinds_of("0", readings) == KINDS - QUESTIONS[question]
    assert kinds_of("1", readings) == KINDS
    assert said() == []
    reader.close()


# -- which GPUs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [FIRST, SECOND]),
        ("1", [SECOND]),
        ("1,0", [SECOND, FIRST]),
        (SECOND, [SECOND]),
        ("GPU-56b5,GPU-e1", [SECOND, FIRST]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,9,0", [SECOND]),
    ],
)
def test_only_the_gpus_of_this_process_by_its_own_numbers(
    nvml: Playback, value: str | None, expected: list[str]
) -> None:
    reader = NvmlReader({} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    assert watts(reader.read()) == {str(number): WATTS[uuid] for number, uuid in enumerate(expected)}
    reader.close()


def test_the_environment_counts_as_it_was_at_the_start(nvml: Playback, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine sets CUDA_VISIBLE_DEVICES for its workers later, and CUDA itself reads it once."""
    registry = prometheus_client.CollectorRegistry()
    metrics = GpuMetrics("fermata_rollout", registry=registry, wait_s=30.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SECOND)
    metrics.start()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    page = prometheus_client.generate_latest(registry).decode()
    metrics.stop()
    assert f'fermata_rollout_gpu_power_watts{{gpu="0",model="{H100}"}} 129.0' in page


def test_a_gpu_that_may_not_be_touched_has_no_number(nvml: Playback, said) -> None:
    nvml.answer("0", "nvmlDeviceGetHandleByIndex_v2", error("NVML_ERROR_NO_PERMISSION"))
    reader = NvmlReader({"CUDA_VISIBLE_DEVICES": "0"})
    assert watts(reader.read()) == {"0": 129.0}
    assert said() == []
    reader.close()


def test_gpus_of_different_models_in_an_order_that_is_not_known(nvml: Playback, said) -> None:
    nvml.play(with_model(load(TWO_H100), "1", "NVIDIA L4"))
    reader = NvmlReader({"CUDA_VISIBLE_DEVICES": "1"})
    assert [reader.read() for _ in range(2)] == [(), ()]
    ((level, sentence),) = [record for record in said() if record[0] != "DEBUG"]
    assert level == "WARNING"
    assert "no GPU is shown; set CUDA_DEVICE_ORDER=PCI_BUS_ID" in sentence
    ordered = NvmlReader({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [(reading.gpu, reading.model) for reading in ordered.read()] == [("0", "NVIDIA L4")]
    ordered.close()


@pytest.mark.parametrize(("driver", "numbers"), [("535.54.03", ["0"]), ("570.133.20", ["0", "1", "2", "3"])])
def test_mig_devices_have_memory_alone(nvml: Playback, said, driver: str, numbers: list[str]) -> None:
    nvml.play(load(A100_MIG))
    nvml.answer("-", "nvmlSystemGetDriverVersion", driver)
    reader = NvmlReader({})
    readings = reader.read()
    assert [reading.gpu for reading in readings] == numbers
    assert {reading.model for reading in readings} == {"NVIDIA A100-SXM4-80GB MIG 1g.20gb"}
    expected = {"memory_used_bytes": 12582912.0, "memory_total_bytes": 20937965568.0}
    assert shown(readings) == {(number, kind): value for number in numbers for kind, value in expected.items()}
    assert said() == []
    reader.close()


def test_a_mig_device_that_was_taken_away_leaves_no_gap(nvml: Playback) -> None:
    recording = load(A100_MIG)
    recording["-"]["nvmlSystemGetDriverVersion"] = "570.133.20"
    del recording["0/1"]
    nvml.play(recording)
    reader = NvmlReader({})
    assert [reading.gpu for reading in reader.read()] == ["0", "1", "2"]
    reader.close()


def test_one_mig_device_by_its_name(nvml: Playback, said) -> None:
    recording = load(A100_MIG)
    recording["0/2"]["nvmlDeviceGetMemoryInfo"] = [300, 100, 200]
    recording["0/2"]["nvmlDeviceGetPowerUsage"] = error("NVML_ERROR_INVALID_ARGUMENT")  # takes whole GPUs alone
    nvml.play(recording)
    reader = NvmlReader({"CUDA_VISIBLE_DEVICES": recording["0/2"]["nvmlDeviceGetUUID"]})
    assert shown(reader.read()) == {("0", "memory_used_bytes"): 200.0, ("0", "memory_total_bytes"): 300.0}
    assert said() == []
    reader.close()


# -- faults in mid-run ------------------------------------------------------------------------------------------------


def lose(recording: Recording, device: str) -> Recording:
    for question in ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", *QUESTIONS):
        recording[device][question] = error("NVML_ERROR_GPU_IS_LOST")
    return recording


def test_a_lost_gpu_vanishes_alone_is_told_once_and_comes_back(nvml: Playback, said) -> None:
    clock = Clock()
    reader = NvmlReader({}, clock)
    assert set(watts(reader.read())) == {"0", "1"}
    assert said() == []

    clock.now += 1000.0
    nvml.play(lose(load(TWO_H100), "0"))
    for _ in range(3):
        readings = reader.read()
        assert kinds_of("0", readings) == set()
        assert kinds_of("1", readings) == KINDS
    assert len(nvml.calls("nvmlInitWithFlags")) == 1
    name = f"GPU 0 ({H100})"
    assert said() == [("WARNING", f"{name}: what it does not answer is left out (GPU is lost)")]
    clock.now += RETRY_S  # NVML is started anew, and does not find it
    assert shown(reader.read()) == {key: value for key, value in shown(readings).items() if key[0] == "1"}
    assert len(nvml.calls("nvmlInitWithFlags")) == 2
    assert said() == []

    nvml.play(load(TWO_H100))
    clock.now += RETRY_S
    assert watts(reader.read()) == {"0": 152.0, "1": 129.0}
    assert said() == [("INFO", f"{name} answers again")]
    clock.now += RETRY_S
    reader.read()
    assert len(nvml.calls("nvmlInitWithFlags")) == 3  # nothing is at fault: it is not started again
    reader.close()


def test_a_gpu_that_is_lost_from_the_start_keeps_its_number(nvml: Playback, said) -> None:
    nvml.play(lose(load(TWO_H100), "0"))
    clock = Clock()
    reader = NvmlReader({}, clock)
    assert [watts(reader.read()) for _ in range(2)] == [{"1": 129.0}, {"1": 129.0}]
    assert said() == [("WARNING", "no metrics of GPU 0 (GPU is lost) of this machine: NVML could not list it")]
    nvml.play(load(TWO_H100))
    clock.now += RETRY_S
    assert watts(reader.read()) == {"0": 152.0, "1": 129.0}
    assert said() == [("INFO", "the GPUs of this process could be listed now")]
    reader.close()


def test_a_lost_gpu_of_somebody_else_is_not_our_concern(nvml: Playback, said) -> None:
    nvml.play(lose(load(TWO_H100), "0"))
    for value in ("1", SECOND):
        reader = NvmlReader({"CUDA_VISIBLE_DEVICES": value})
        assert watts(reader.read()) == {"0": 129.0}
        reader.close()
    assert said() == []


# -- a scrape's bound -------------------------------------------------------------------------------------------------


class Page:
    """A metrics port of its own, with one other metric on it."""

    def __init__(self, wait_s: float) -> None:
        registry = prometheus_client.CollectorRegistry()
        prometheus_client.Gauge("fermata_rollout_other", "Another metric", registry=registry).set(7)
        self.metrics = GpuMetrics("fermata_rollout", registry=registry, wait_s=wait_s)
        self.metrics.start()
        self._server, _ = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)

    def get(self) -> tuple[dict[str, float], float]:
        """The GPU series, and the seconds it took. The other metric must be there."""
        begun = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{self._server.server_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        assert "fermata_rollout_other 7.0" in text
        return on_page(text), time.monotonic() - begun

    def close(self) -> None:
        self.metrics.stop()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def open_page(nvml: Playback) -> Iterator[Callable[[float], Page]]:
    pages: list[Page] = []

    def opened(wait_s: float) -> Page:
        pages.append(Page(wait_s))
        return pages[-1]

    yield opened
    nvml.play(load(TWO_H100))  # nothing hangs any more
    for page in pages:
        page.close()


def test_a_call_that_hangs_holds_one_thread_and_no_scrape(
    nvml: Playback, open_page: Callable[[float], Page], said
) -> None:
    page = open_page(1.0)
    nvml.answer("1", "nvmlDeviceGetMemoryInfo", HANG)
    with ThreadPoolExecutor(5) as pool:
        answers = [answer.result() for answer in [pool.submit(page.get) for _ in range(5)]]
    assert [series for series, _ in answers] == [{}] * 5
    assert 0.9 < max(seconds for _, seconds in answers) < 10.0  # the bound is 1 s; the machine may be busy
    quick = [page.get() for _ in range(5)]  # the bound is over: nobody waits for the same call again
    assert [series for series, _ in quick] == [{}] * 5
    assert min(seconds for _, seconds in quick) < 0.5
    assert len([thread for thread in threading.enumerate() if thread.name == "gpu-metrics"]) == 1
    assert nvml.calls("nvmlDeviceGetMemoryInfo") == ["0", "1"]
    assert said() == [("WARNING", "NVML has not answered for 1 s: GPU metrics are left out until it does")]

    nvml.play(load(TWO_H100))
    deadline = time.monotonic() + 20
    while not (series := page.get()[0]):
        assert time.monotonic() < deadline, "the GPUs did not come back"
    assert len(series) == 8
    assert said() == [("INFO", "NVML answers again")]


def test_two_scrapes_behind_one_another_fit_into_the_time_that_a_local_prometheus_gives_one() -> None:
    """It scrapes every SCRAPE_S and waits no longer; the live view looks too, and pages are made one by one."""
    assert 2 * WAIT_S <= SCRAPE_S


def test_the_end_does_not_wait_for_a_call_that_hangs(nvml: Playback, open_page: Callable[[float], Page]) -> None:
    page = open_page(0.2)
    nvml.answer("-", "nvmlInitWithFlags", HANG)
    assert page.get()[0] == {}
    begun = time.monotonic()
    page.metrics.stop()
    assert time.monotonic() - begun < 10.0  # it waits 1 s
    assert page.get()[0] == {}


def test_scrapes_at_the_same_time_share_one_answer(nvml: Playback, open_page: Callable[[float], Page]) -> None:
    page = open_page(30.0)
    nvml.answer("0", "nvmlDeviceGetUtilizationRates", HANG)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(page.get) for _ in range(4)]
        while not nvml.calls("nvmlDeviceGetUtilizationRates"):
            assert not any(answer.done() for answer in waiting)
        nvml.play(load(TWO_H100))
        assert [len(answer.result()[0]) for answer in waiting] == [8] * 4
    assert nvml.calls("nvmlDeviceGetUtilizationRates") == ["0", "1"]


def test_nvml_is_asked_once_a_second_however_often_it_is_scraped(nvml: Playback) -> None:
    clock = Clock()
    latest = LatestReadings(NvmlReader({}), wait_s=30.0, clock=clock)
    for _ in range(5):
        assert watts(latest.get()) == {"0": 152.0, "1": 129.0}
        clock.now += 0.19
    nvml.answer("0", "nvmlDeviceGetPowerUsage", 300000)
    assert watts(latest.get()) == {"0": 152.0, "1": 129.0}
    assert nvml.calls("nvmlDeviceGetPowerUsage") == ["0", "1"]
    clock.now += 0.1
    assert watts(latest.get()) == {"0": 300.0, "1": 129.0}
    assert nvml.calls("nvmlDeviceGetPowerUsage") == ["0", "1", "0", "1"]
    latest.close()
    assert latest.get() == ()


def test_an_answer_stands_in_for_a_late_one_until_it_is_too_old(nvml: Playback, said) -> None:
    clock = Clock()
    latest = LatestReadings(NvmlReader({}), wait_s=1.0, stale_s=5.0, clock=clock)
    assert watts(latest.get()) == {"0": 152.0, "1": 129.0}
    for _ in range(2):  # the second time is told as the first
        nvml.answer("0", "nvmlDeviceGetPowerUsage", HANG)
        clock.now += 4.0
        assert watts(latest.get()) == {"0": 152.0, "1": 129.0}
        clock.now += 1.0
        assert latest.get() == ()
        assert said() == [("WARNING", "NVML has not answered for 1 s: GPU metrics are left out until it does")]
        nvml.play(load(TWO_H100))
        deadline = time.monotonic() + 20
        while not latest.get():
            assert time.monotonic() < deadline
        clock.now += 1.0
        assert watts(latest.get()) == {"0": 152.0, "1": 129.0}
        assert said() == [("INFO", "NVML answers again")]
    latest.close()


def test_a_fault_of_the_program_is_told_once_and_ends_only_the_gpu_metrics(said) -> None:
    class Broken:
        def read(self) -> tuple[Reading, ...]:
            raise LookupError("a bug")

        def close(self) -> None:
            raise AssertionError

    latest = LatestReadings(Broken(), wait_s=30.0)
    assert [latest.get() for _ in range(3)] == [(), (), ()]
    ((level, sentence),) = said()
    assert (level, sentence.startswith("GPU metrics ended")) == ("ERROR", True)
    latest.close()
