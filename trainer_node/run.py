"""One training run from its settings to its summary.

Owns the order of things: files are checked first, then the model, then the nodes, then evaluations and training.
Invariant: however a run ends, `trainer_summary.json` says how, with what was measured up to then.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from node_runtime.errors import EXIT_FAILED, EXIT_USAGE, NodeError
from node_runtime.keys import InvalidKey, check_id
from node_runtime.logs import get_logger
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.spans import SpanWriter
from trainer_node import checkpoint, rewards
from trainer_node.dispatcher import Dispatcher
from trainer_node.evaluation import Evaluator
from trainer_node.loop import TrainingLoop
from trainer_node.masks import MaskTally
from trainer_node.model import PolicyModel
from trainer_node.progress import ProgressFeed
from trainer_node.publish import Publisher, Pusher
from trainer_node.record import RunRecord
from trainer_node.sampling import GroupSampler, Sampler
from trainer_node.settings import TrainerSettings
from trainer_node.tasks import Task, TaskStream, load_tasks, pick_eval_tasks, tools_of
from trainer_node.update import PolicyUpdate
from trainer_node.worker import ModelThread

TICK_S = 1.0
TOLD_AT_END = ("accuracy_before", "accuracy_after", "accuracy_without_tools", "steps", "masked_share", "calls_lost")

log = get_logger(__name__)


class TrainerRun:
    """`run()` does everything; `interrupt()` makes a cancelled run end soon even in the middle of a step."""

    def __init__(
        self,
        settings: TrainerSettings,
        runtime: RuntimeSettings,
        *,
        make_pusher: Callable[[PolicyModel, TrainerSettings, RuntimeSettings], Pusher],
    ) -> None:
        self.settings = settings
        self._runtime = runtime
        self._make_pusher = make_pusher
        name = runtime.node_name or "trainer"
        self.run_id = settings.run_id or f"run-{uuid.uuid4().hex[:12]}"
        try:
            check_id("trainer.run_id", self.run_id)
        except InvalidKey as error:
            raise NodeError(str(error), EXIT_USAGE) from None
        self._reward = rewards.load_reward(settings.reward)
        need_answer = settings.reward == "exact_answer"
        self._train_tasks = load_tasks(settings.train_tasks, need_answer=need_answer)
        self._eval_tasks: list[Task] = []
        if settings.eval_tasks is not None:
            tasks = load_tasks(settings.eval_tasks, need_answer=need_answer)
            self._eval_tasks = pick_eval_tasks(tasks, settings.eval.tasks, settings.seed)
        self._spans = SpanWriter(runtime.spans_dir, name)
        self._masks = MaskTally(
            share_limit=settings.masked.share_limit,
            window=settings.masked.window,
            min_samples=settings.masked.min_samples,
        )
        self._thread = ModelThread(settings.threads)
        try:
            feed = ProgressFeed(settings.run_dir / "progress.jsonl")
        except OSError as error:
            raise NodeError(f"trainer.run_dir {settings.run_dir} cannot be written: {error}", EXIT_USAGE) from error
        self._record = RunRecord(feed, self._spans, seed=settings.seed)
        self._model: PolicyModel | None = None
        self._update: PolicyUpdate | None = None
        self._dispatcher: Dispatcher | None = None
        self._sampler: Sampler | None = None
        self._publisher: Publisher | None = None
        self._loop: TrainingLoop | None = None
        self._evaluator: Evaluator | None = None
        self._groups: GroupSampler | None = None

    def interrupt(self) -> None:
        """Called with a cancellation: the step on the model's thread ends between two microbatches."""
        if self._update is not None:
            self._update.stop.set()

    async def run(self) -> None:
        """Raises NodeError where the run cannot go on, CancelledError where it was stopped. The summary is written."""
        outcome, problem = "failed", None
        try:
            outcome = "target_reached" if await self._all() else "finished"
        except asyncio.CancelledError:
            outcome = "interrupted"
            raise
        except NodeError as error:
            problem = str(error)
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            await self._finish(outcome, problem)

    async def _all(self) -> bool:
        settings, record = self.settings, self._record
        self._say("start", run_id=self.run_id, seed=settings.seed, train_tasks=len(self._train_tasks))
        with record.phase("load"):
            model = await self._thread.run(
                PolicyModel.load,
                settings.model,
                dtype=settings.dtype,
                device=settings.device,
                tokens_per_microbatch=settings.tokens_per_microbatch,
            )
            self._model = model
            self._update = update = PolicyUpdate(model, settings)
            first_step, tasks = await self._thread.run(self._restore, model, update)
        rewarder = rewards.Rewarder(self._reward, workers=settings.reward_workers, timeout_s=settings.reward_timeout_s)
        try:
            self._dispatcher = dispatcher = Dispatcher(
                settings.rollout_nodes,
                settings.dispatch,
                self._runtime,
                run_id=self.run_id,
                trainer_id=self._runtime.node_name or "trainer",
            )
            # A run id that is made at start belongs to this process alone; one that is set may have had others.
            suffix = f"-{uuid.uuid4().hex[:8]}" if settings.run_id else ""
            self._sampler = Sampler(dispatcher, rewarder, settings, self._masks, self._spans, suffix=suffix)
            async with beside(dispatcher.serve(), self._tick()):
                try:
                    return await self._with_nodes(dispatcher, self._sampler, model, update, first_step, tasks)
                finally:
                    # Cancelled trajectories say how they and their calls ended.
                    await dispatcher.settle()
        finally:
            rewarder.close()

    async def _with_nodes(
        self,
        dispatcher: Dispatcher,
        sampler: Sampler,
        model: PolicyModel,
        update: PolicyUpdate,
        first_step: int,
        tasks: TaskStream,
    ) -> bool:
        settings, record = self.settings, self._record
        with record.phase("connect"):
            await dispatcher.wait_for_nodes(settings.dispatch.startup_timeout_s, self._on_wait)
            named = tools_of([*self._train_tasks, *self._eval_tasks])
            await dispatcher.wait_for_tools(named, settings.dispatch.tools_timeout_s, self._on_wait)
        self._publisher = publisher = Publisher(
            self._make_pusher(model, settings, self._runtime),
            dispatcher,
            settings.sync,
            vocab_size=model.vocab_size,
            seed=settings.seed,
            node_timeout_s=settings.dispatch.node_timeout_s,
            on_wait=self._on_wait,
        )
        try:
            return await self._with_weights(dispatcher, sampler, update, publisher, first_step, tasks)
        finally:
            # Bounded by the sync itself; a node that is gone costs it its find timeout.
            await publisher.close()

    async def _with_weights(
        self,
        dispatcher: Dispatcher,
        sampler: Sampler,
        update: PolicyUpdate,
        publisher: Publisher,
        first_step: int,
        tasks: TaskStream,
    ) -> bool:
        settings, record = self.settings, self._record
        with record.phase("first_sync", kind="sync", version=1):
            await publisher.publish()
        self._say("synced", version=publisher.version.number)
        self._evaluator = evaluator = Evaluator(sampler, settings.eval)
        self._groups = groups = GroupSampler(sampler, tasks, settings, lambda: publisher.version)
        self._loop = loop = TrainingLoop(
            settings,
            groups=groups,
            stats=sampler.stats,
            update=update,
            thread=self._thread,
            publisher=publisher,
            dispatcher=dispatcher,
            masks=self._masks,
            record=record,
            evaluator=evaluator,
            eval_tasks=self._eval_tasks,
            save=self._save,
        )
        if settings.eval.before:
            await self._evaluate("before")
        reached = await loop.run(first_step)
        if settings.eval.after:
            await self._evaluate("after")
        if settings.eval.without_tools:
            await self._evaluate("without_tools", tools=False)
        return reached

    async def _evaluate(self, name: str, *, tools: bool = True) -> None:
        if not self._eval_tasks or self._loop is None or self._publisher is None:
            return
        with self._record.phase(f"eval_{name}", kind="eval", version=self._publisher.version.number):
            result = await self._loop.evaluate(name, self._eval_tasks, tools=tools)
        self._record.evals[name] = result
        self._record.feed.write("eval", f"eval_{name}", **result.report())
        log.info(f"held-out accuracy, {name}", accuracy=round(result.accuracy, 3), samples=result.scored)

    async def _finish(self, outcome: str, problem: str | None) -> None:
        """Write what there is. Does not raise: the way the run ended is what the caller is to see."""
        record, settings = self._record, self.settings
        # A step that still runs must end before the policy is written.
        self.interrupt()
        try:
            if settings.export and self._model is not None and record.steps:
                with record.phase("export"):
                    await self._thread.run(self._model.export, settings.run_dir / "model")
            publisher = self._publisher
            summary = record.summary(
                outcome=outcome,
                error=problem,
                run_id=self.run_id,
                sampler=self._sampler,
                dispatcher=self._dispatcher,
                masks=self._masks,
                syncs=publisher.tally if publisher is not None else None,
                lineage=publisher.version.lineage if publisher is not None else None,
                version=publisher.version.number if publisher is not None else None,
            )
            record.write(settings.run_dir, summary)
            record.feed.write(
                "end", "end", outcome=outcome, error=problem, **{key: summary[key] for key in TOLD_AT_END}
            )
        except OSError as error:
            log.error(f"the end of the run could not be written to {settings.run_dir}: {error}")
        finally:
            record.feed.close()
            self._spans.close()
            self._thread.close()

    def _restore(self, model: PolicyModel, update: PolicyUpdate) -> tuple[int, TaskStream]:
        """(first step, the tasks that follow), with policy, optimiser and random state as the checkpoint has them."""
        import torch

        torch.manual_seed(self.settings.seed)
        found = checkpoint.load(self.settings.run_dir / "checkpoint") if self.settings.resume else None
        if found is None:
            return 1, TaskStream(self._train_tasks, self.settings.seed)
        progress, policy, state = found
        model.module.load_state_dict(policy)
        update.load_state_dict(state)
        log.info("resumed", step=progress.step, frontier=progress.frontier, from_lineage=progress.lineage)
        self._record.steps = progress.step
        tasks = TaskStream(self._train_tasks, self.settings.seed, progress.frontier, progress.untrained)
        return progress.step + 1, tasks

    async def _save(self, step: int) -> None:
        model, update, publisher, groups = self._model, self._update, self._publisher, self._groups
        assert model is not None
        assert update is not None
        assert publisher is not None
        assert groups is not None
        progress = checkpoint.Progress(
            step=step,
            frontier=groups.frontier,
            seed=self.settings.seed,
            lineage=publisher.version.lineage,
            version=publisher.version.number,
            untrained=groups.untrained,
        )
        folder = self.settings.run_dir / "checkpoint"
        try:
            await self._thread.run(checkpoint.save, folder, progress, model.module.state_dict(), update.state_dict())
        except OSError as error:
            raise NodeError(f"the checkpoint {folder} cannot be written: {error}", EXIT_FAILED) from error

    async def _tick(self) -> None:
        """Once a second say where the run stands, for whoever watches."""
        while True:
            await asyncio.sleep(TICK_S)
            fields: dict[str, Any] = {"step": self._record.steps, "steps": self.settings.steps}
            if self._dispatcher is not None and self._sampler is not None:
                fields.update(
                    in_flight=self._dispatcher.in_flight,
                    trajectories=self._sampler.stats.trajectories,
                    tokens=self._sampler.stats.model_tokens,
                    eval_trajectories=self._sampler.eval_stats.trajectories,
                )
            if self._loop is not None and self._groups is not None:
                fields.update(
                    groups_collected=self._loop.collected,
                    groups_per_step=self.settings.groups_per_step,
                    groups_in_flight=self._groups.in_flight,
                    groups_ready=self._groups.ready,
                )
            if self._evaluator is not None and self._record.phase_name.startswith("eval"):
                fields.update(eval_done=self._evaluator.done, eval_total=self._evaluator.total)
            self._record.feed.write("tick", self._record.phase_name, masked_share=self._masks.share, **fields)

    def _on_wait(self, sentence: str) -> None:
        log.warning(sentence)
        self._say("waiting", message=sentence)

    def _say(self, event: str, **fields: Any) -> None:
        self._record.feed.write(event, self._record.phase_name, **fields)


@contextlib.asynccontextmanager
async def beside(*services: Any) -> AsyncIterator[None]:
    """Run services beside a body. They end with it; where one fails first, the body is cancelled and that is raised."""
    body = asyncio.current_task()
    assert body is not None
    failed: list[BaseException] = []

    def watch(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed.append(error)
            body.cancel()

    tasks = [asyncio.ensure_future(service) for service in services]
    for task in tasks:
        task.add_done_callback(watch)
    try:
        yield
    except asyncio.CancelledError:
        if failed and body.uncancel() == 0:
            raise failed[0] from None
        raise
    finally:
        for task in tasks:
            task.remove_done_callback(watch)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
