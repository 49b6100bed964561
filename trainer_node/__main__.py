"""`python -m trainer_node --config fermata.yaml`: one training run as a process.

Exit codes: 0 it ended or was asked to stop, 2 settings or files are wrong, 3 no rollout node, 4 it could not go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import NoReturn

from node_runtime import process
from node_runtime.logs import get_logger
from node_runtime.metrics import start_metrics, stop_metrics
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import SettingsError, load_for_process
from trainer_node import metrics
from trainer_node.ended import ended_run
from trainer_node.settings import TrainerSettings

log = get_logger("trainer_node")


async def serve(lifetime: process.Lifetime, settings: TrainerSettings, runtime: RuntimeSettings) -> None:
    """The run until its end or the first signal; with `stay` the end is waited out, and an ended run is left alone."""
    port = start_metrics(runtime, lifetime.health)
    metrics.GPUS.start()
    try:
        ended = ended_run(settings) if settings.stay else None
        if ended is None:
            await _train(lifetime, settings, runtime, port)
        else:
            lifetime.ready(metrics_port=port, run_dir=str(settings.run_dir), run_id=None)
        if settings.stay and not lifetime.stopping.is_set():
            log.info(ended or "the run has ended: staying until stopped", run_dir=str(settings.run_dir))
            await lifetime.stopping.wait()
    finally:
        metrics.GPUS.stop()
        stop_metrics(port)


async def _train(
    lifetime: process.Lifetime, settings: TrainerSettings, runtime: RuntimeSettings, port: int | None
) -> None:
    """The run until its end or the first signal; then what it has is written."""
    # Only now: --help and a settings error need no torch.
    from trainer_node.pusher import make_pusher
    from trainer_node.run import TrainerRun

    run = TrainerRun(settings, runtime, make_pusher=make_pusher)
    lifetime.ready(metrics_port=port, run_dir=str(settings.run_dir), run_id=run.run_id)
    work = asyncio.create_task(run.run(), name="run")
    stopping = asyncio.create_task(lifetime.stopping.wait(), name="stopping")
    try:
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            run.interrupt()
            work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            if not lifetime.stopping.is_set():
                raise
    finally:
        stopping.cancel()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    try:
        sections = load_for_process("trainer_node", {"runtime": RuntimeSettings, "trainer": TrainerSettings}, argv=argv)
    except SettingsError as error:
        print(error, file=sys.stderr)  # noqa: T201 - before logging is set up
        return error.exit_code
    settings, runtime = sections["trainer"], sections["runtime"]
    assert isinstance(settings, TrainerSettings)
    assert isinstance(runtime, RuntimeSettings)
    return process.run(lambda lifetime: serve(lifetime, settings, runtime), runtime, process="trainer_node")


def leave(code: int) -> NoReturn:
    """End the process now. All files are closed by then, and tearing torch down takes seconds on a busy machine."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
