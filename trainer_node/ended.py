"""Whether the run of a run folder has ended, for a trainer that is started again by whatever supervises it.

Invariant: only a summary that says the run ended well, with no step left of those asked for, counts; anything else
(none, an unreadable one, a run that failed or was interrupted, more steps asked for since) is run.
"""

from __future__ import annotations

import json
from typing import Any

from trainer_node.settings import TrainerSettings


def ended_run(settings: TrainerSettings) -> str | None:
    """One sentence on the run that has ended in run_dir; None where there is something to do."""
    path = settings.run_dir / "trainer_summary.json"
    try:
        summary: Any = json.loads(path.read_text(encoding="utf-8"))
        outcome, steps = summary["outcome"], int(summary["steps"])
    except (OSError, ValueError, TypeError, LookupError):
        return None
    if outcome == "target_reached" or (outcome == "finished" and steps >= settings.steps):
        how = f"{outcome} after {steps} steps"
        return f"the run in {settings.run_dir} has ended ({how}): name another run_dir to train anew"
    return None
