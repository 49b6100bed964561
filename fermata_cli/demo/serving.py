"""The demo's system without its trainer, for notebooks and experiments: tool backends, a gateway, a rollout node.

Invariant: what is started is what `fermata demo` starts, from the same settings; only the tools are the caller's, and
the rollout node serves the model as it is shipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fermata_cli.cluster.local import LocalCluster
from fermata_cli.commands.demo_settings import DemoOptions, DemoSettings


def serving_cluster(
    run_dir: Path, *, tools: Mapping[str, str], overrides: Sequence[str] = (), say: Callable[[str], None] = print
) -> LocalCluster:
    """Writes `run_dir`/fermata.yaml; `await cluster.start(trainer=False)` then starts the processes.

    `tools`: by name, each with where it is: module:object, or the name of a built-in one; one backend serves them all.
    `overrides`: section.key=value, as of `fermata demo --set`. Raises NodeError for settings that cannot be used.
    """
    backend = {"name": "tools", "tools": list(tools.values())}
    ours = (
        f"cluster.backends={json.dumps([backend])}",
        "backend.delay.share=0",  # the demo slows a few calls down, to show that nobody waits for them
        "rollout.engine.serve_before_sync=true",
    )
    settings = DemoSettings(DemoOptions(overrides=(*ours, *overrides)), run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    config = run_dir / "fermata.yaml"
    settings.write(config)
    return LocalCluster(
        settings.cluster,
        settings.runtime,
        config,
        run_dir,
        tools=tools,
        bound=settings.bound_cores,
        say=say,
        hosts=settings.hosts,
    )
