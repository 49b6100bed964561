"""The settings of a demo run: its own file, or the user's, with variables and flags over it.

Invariant: what is written to `fermata.yaml` of the run is complete and validated: every process reads that file, and
`FERMATA_*` variables and flags are already in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fermata_cli import demo
from fermata_cli.cluster.identity import ClusterIdentity
from fermata_cli.cluster.plan import Role
from fermata_cli.cluster.settings import ClusterSettings
from fermata_cli.schema import ALL_SECTIONS
from node_runtime.errors import EXIT_USAGE, NodeError
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import Section, dump, load
from node_runtime.settings.sources import ENV_CONFIG, Merged, merge_sources
from rollout_node.settings import RolloutSettings
from tool_backend.settings import BackendSettings
from tool_gateway.settings import GatewaySettings
from trainer_node.settings import TrainerSettings
from trainer_node.tasks import Task, load_tasks

S = TypeVar("S", bound=Section)
DEMO_FILE = demo.HERE / "fermata.yaml"
_MODELS = ("rollout.model", "trainer.model")
# Only the cluster knows these; each process is given its own by flag.
_BY_FLAG = (("rollout", "gateway"), ("gateway", "pools"))


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """The flags of `fermata demo`."""

    seed: int = 0
    name: str = "demo"
    runs: Path = Path("runs")
    steps: int | None = None
    rollout_nodes: int | None = None
    slow_share: float | None = None
    slow_seconds: tuple[float, float] | None = None
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    plain: bool = False
    stay: bool = False
    tls: bool = False


class DemoSettings:
    """Loaded, checked and still to be written."""

    def __init__(self, options: DemoOptions, run_dir: Path) -> None:
        """Raises NodeError for settings, task files or a model folder that cannot be used."""
        file = options.config or DEMO_FILE
        merged = merge_sources(ALL_SECTIONS, file, _env(), options.overrides)
        given = merged.tree
        self.identity = _identity(merged, run_dir) if options.tls else None
        overrides = [*_defaults(given), *_flags(options, run_dir, self.identity), *options.overrides]
        self._sections = load(ALL_SECTIONS, file=file, env=_env(), overrides=overrides)
        self.cluster = self._section("cluster", ClusterSettings)
        self.runtime = self._section("runtime", RuntimeSettings)
        self.rollout = self._section("rollout", RolloutSettings)
        self.trainer = self._section("trainer", TrainerSettings)
        self.bound_cores = self.rollout.engine.cpu_omp_threads_bind
        self.tool_places, self.always_offered = self._check_tasks()
        self._check_model([key for key in _MODELS if _has(given, key)])
        self._keep_inputs(run_dir)

    def _section(self, name: str, kind: type[S]) -> S:
        section = self._sections[name]
        assert isinstance(section, kind)
        return section

    @property
    def hosts(self) -> dict[Role, str]:
        """What each role listens on."""
        return {
            Role.BACKEND: self._section("backend", BackendSettings).host,
            Role.GATEWAY: self._section("gateway", GatewaySettings).host,
            Role.ROLLOUT: self.rollout.host,
        }

    @property
    def _task_files(self) -> list[Path]:
        return [self.trainer.train_tasks, *((self.trainer.eval_tasks,) if self.trainer.eval_tasks else ())]

    def _check_tasks(self) -> tuple[dict[str, str], frozenset[str]]:
        """The tools that tasks name, each with file and line of the first that does, and those that every task names.

        A broken line is told now, not after the engine's minute.
        """
        need_answer = self.trainer.reward == "exact_answer"
        places: dict[str, str] = {}
        always: frozenset[str] | None = None
        for file in self._task_files:
            for place, task in _with_places(file, load_tasks(file, need_answer=need_answer)):
                for tool in task.tools:
                    places.setdefault(tool, place)
                always = frozenset(task.tools) if always is None else always & frozenset(task.tools)
        return places, always or frozenset()

    @property
    def _models(self) -> dict[str, Path]:
        return {"rollout.model": Path(self.rollout.model), "trainer.model": self.trainer.model}

    def _check_model(self, given: Sequence[str]) -> None:
        """As far as can be seen without loading it. The key that was given is named, not the one that follows it."""
        for key in given or _MODELS:
            model = self._models[key]
            if not (model / "config.json").is_file():
                what = "holds no config.json" if model.is_dir() else "is no folder"
                raise NodeError(f"{key}: {model} {what}: give a Hugging Face model folder", EXIT_USAGE)

    def _keep_inputs(self, run_dir: Path) -> None:
        """The run's folder is emptied before anything is read from it."""
        inputs = {**self._models, "trainer.train_tasks": self.trainer.train_tasks}
        if self.trainer.eval_tasks:
            inputs["trainer.eval_tasks"] = self.trainer.eval_tasks
        for key, path in inputs.items():
            if path.resolve().is_relative_to(run_dir.resolve()):
                raise NodeError(
                    f"{key}: {path} stands in the folder of this run, which is emptied first: choose another --name",
                    EXIT_USAGE,
                )

    def write(self, path: Path, *, gateway: str | None = None) -> None:
        """The file that all processes of the run read; with the gateway's address, once it is up, for people too."""
        tree = yaml.safe_load(dump(self._sections))
        for section, key in _BY_FLAG:
            del tree[section][key]
        if gateway is not None:
            tree["rollout"]["gateway"] = [gateway]
        head = "# The settings of this run, complete. Names, ports and addresses are set by flag: see cluster.json.\n"
        partial = path.with_name(path.name + ".partial")  # a process that is started again may read it now
        partial.write_text(
            head + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8"
        )
        partial.replace(path)


def _with_places(file: Path, tasks: Sequence[Task]) -> Iterator[tuple[str, Task]]:
    """Each task with the place it stands at, file:line."""
    lines = file.read_text(encoding="utf-8").split("\n")
    numbers = (number for number, line in enumerate(lines, start=1) if line.strip())
    for number, task in zip(numbers, tasks, strict=True):
        yield f"{file}:{number}", task


def _env() -> Mapping[str, str]:
    """FERMATA_CONFIG names a file for the other commands; the demo has its own."""
    return {name: value for name, value in os.environ.items() if name != ENV_CONFIG}


def _defaults(given: Mapping[str, Any]) -> list[str]:
    """What the demo brings along, for keys that nobody set."""
    rollout_model, trainer_model = (given.get(section, {}).get("model") for section in ("rollout", "trainer"))
    values = {
        "rollout.model": trainer_model or str(demo.MODEL_DIR),
        "trainer.model": rollout_model or str(demo.MODEL_DIR),
        "trainer.train_tasks": str(demo.TRAIN_TASKS),
        "backend.search.corpus": str(demo.CORPUS),
    }
    if "train_tasks" not in given.get("trainer", {}):
        values["trainer.eval_tasks"] = str(demo.EVAL_TASKS)  # tasks of one's own have no held-out ones here
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if not _has(given, key)]


def _has(tree: Mapping[str, Any], key: str) -> bool:
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _identity(given: Merged, run_dir: Path) -> ClusterIdentity:
    for section in ("tls", "tokens"):
        if _has(given.tree, f"runtime.{section}"):
            keys = given.tree["runtime"][section]
            first = list(keys)[:1] if isinstance(keys, Mapping) else []
            raise NodeError(
                f"--tls makes certificates and a token of its own, and runtime.{section} is set too "
                f"({given.origin(('runtime', section, *first))}): use one of them",
                EXIT_USAGE,
            )
    return ClusterIdentity(run_dir / "tls")


def _flags(options: DemoOptions, run_dir: Path, identity: ClusterIdentity | None) -> list[str]:
    values: dict[str, Any] = {
        **(identity.settings if identity else {}),
        "trainer.rollout_nodes": ["127.0.0.1:0"],  # required; the trainer is told the real ones by flag
        "trainer.run_dir": str(run_dir),
        "runtime.spans_dir": str(run_dir / "spans"),
        "trainer.seed": options.seed,
        "rollout.engine.seed": options.seed,
    }
    if options.steps is not None:
        values["trainer.steps"] = options.steps
    if options.rollout_nodes is not None:
        values["cluster.rollout_nodes"] = options.rollout_nodes
    if options.slow_share is not None:
        values["backend.delay.share"] = options.slow_share
    if options.slow_seconds is not None:
        values["backend.delay.seconds"] = list(options.slow_seconds)
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]
