"""scripts/prometheus.sh: where one is on PATH, where one was unpacked before, and where none can be had."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.prometheus import REPOSITORY

pytestmark = pytest.mark.integration


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone that holds the script alone; its PATH has what every system has, and no package manager."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "prometheus.sh", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for command in ("bash", "dirname"):
        found = shutil.which(command)
        assert found is not None
        (tmp_path / "bin" / command).symlink_to(found)
    return tmp_path


@pytest.fixture
def script(clone: Path) -> Callable[[], tuple[int, str, str]]:
    def run(path: str = str(clone / "bin"), **env: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [clone / "bin" / "bash", "scripts/prometheus.sh"], env={"PATH": path, **env}, cwd=clone,
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def put(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)


def test_the_one_on_path_is_used(clone: Path, script: Callable[[], tuple[int, str, str]]) -> None:
    put(clone / ".tools/prometheus/usr/bin", "prometheus", "promtool")
    put(clone / "bin", "prometheus", "promtool")
    assert script() == (0, f"{clone}/bin/prometheus\n", "")


def test_one_without_promtool_beside_it_is_passed_over(clone: Path, script: Callable[[], tuple[int, str, str]]) -> None:
    put(clone / ".tools/prometheus/usr/bin", "prometheus", "promtool")
    put(clone / "bin", "prometheus")
    assert script() == (0, f"{clone}/.tools/prometheus/usr/bin/prometheus\n", "")


def test_the_path_alone_is_printed_and_it_is_a_whole_one(
    clone: Path, script: Callable[..., tuple[int, str, str]]
) -> None:
    put(clone / "bin", "prometheus", "promtool")
    (clone / "elsewhere" / "scripts").mkdir(parents=True)
    assert script(CDPATH=str(clone / "elsewhere")) == (0, f"{clone}/bin/prometheus\n", "")
    assert script("./bin") == (0, f"{clone}/./bin/prometheus\n", "")


def test_where_nothing_can_be_written_one_sentence_says_so(
    clone: Path, script: Callable[[], tuple[int, str, str]]
) -> None:
    for command in ("mkdir", "mktemp"):
        found = shutil.which(command)
        assert found is not None
        (clone / "bin" / command).symlink_to(found)
    put(clone / "bin", "dpkg", "apt-get")
    (clone / ".tools").write_text("a file")
    code, out, err = script()
    assert (code, out) == (3, "")
    (line,) = err.splitlines()
    assert line.startswith(f"prometheus: none is on PATH, and nothing can be written to {clone}/.tools: install ")


def test_where_none_can_be_had_one_sentence_says_what_to_install(script: Callable[[], tuple[int, str, str]]) -> None:
    code, out, err = script()
    assert (code, out) == (3, "")
    assert err == (
        "prometheus: none is on PATH, and this is no Debian whose package could be unpacked: install "
        "Prometheus 2.40 or later, so that prometheus and promtool are on PATH.\n"
    )


def test_where_the_package_cannot_be_fetched_the_reason_stands_in_the_sentence(
    clone: Path, script: Callable[[], tuple[int, str, str]]
) -> None:
    for command in ("mkdir", "mktemp", "rm", "chmod", "grep", "tail"):
        found = shutil.which(command)
        assert found is not None
        (clone / "bin" / command).symlink_to(found)
    put(clone / "bin", "dpkg")
    (clone / "bin" / "apt-get").write_text("#!/bin/bash\necho 'E: the network is down' >&2\nexit 100\n")
    (clone / "bin" / "apt-get").chmod(0o755)
    code, out, err = script()
    assert (code, out) == (3, "")
    assert err.splitlines()[-1] == (
        "prometheus: none is on PATH, and apt-get could not download the package (E: the network is down): install "
        "Prometheus 2.40 or later, so that prometheus and promtool are on PATH."
    )
    assert list((clone / ".tools").iterdir()) == []
