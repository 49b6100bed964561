"""`fermata turn check`: files of model outputs through the parser and the validator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from node_runtime.errors import EXIT_CHECK_FAILED, EXIT_OK, EXIT_USAGE, NodeError
from node_runtime.outcomes import outcome_name
from rollout_node.turn.check import CaseResult, check_cases, format_results


def check(tools: Path, cases: Path, *, model: str | None, default_format: str, only_misses: bool, as_json: bool) -> int:
    """The table goes to stderr, or everything as one JSON object to stdout."""
    results = check_cases(tools, cases, model_path=model, default_format=default_format)
    if not results:
        raise NodeError(f"{cases} holds no case: it needs at least one JSON object, one per line", EXIT_USAGE)
    missed = sum(not result.passed for result in results)
    if as_json:
        shown = [_as_json(result) for result in results if not (only_misses and result.passed)]
        print(json.dumps({"cases": len(results), "missed": missed, "results": shown}, ensure_ascii=False))
    else:
        print(format_results(results, only_misses=only_misses), file=sys.stderr)
    return EXIT_CHECK_FAILED if missed else EXIT_OK


def _as_json(result: CaseResult) -> dict[str, Any]:
    return {
        "id": result.case_id,
        "line": result.line,
        "passed": result.passed,
        "misses": list(result.misses),
        "note": result.note,
        "text": result.text,
        "calls": [
            {
                "ordinal": call.ordinal,
                "tool": call.name,
                "args": None if call.args_json is None else call.args_json.decode("utf-8", "replace"),
                "outcome": outcome_name(call.outcome),
                "message": call.message,
            }
            for call in result.calls
        ],
    }
