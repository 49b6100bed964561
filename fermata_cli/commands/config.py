"""`fermata config show`: the settings of all processes, resolved and validated by their owners.

`fermata config reference`: everything that can be set, or what is measured, as docs/ holds it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fermata_cli.schema import ALL_SECTIONS
from node_runtime.errors import EXIT_OK
from node_runtime.settings import Section, dump, load
from node_runtime.settings.sources import ENV_CONFIG, merge_sources


def show(file: Path | None, overrides: Sequence[str]) -> int:
    """Prints YAML that the processes accept. Sections that nothing sets and that cannot do without are left out."""
    if file is None and os.environ.get(ENV_CONFIG):
        file = Path(os.environ[ENV_CONFIG])
    mentioned = merge_sources(ALL_SECTIONS, file, os.environ, overrides).tree
    schema = {}
    for name, section in ALL_SECTIONS.items():
        needed = _required(section)
        if needed and name not in mentioned:
            print(f"{name}: left out, nothing sets it (it needs {', '.join(needed)})", file=sys.stderr)
        else:
            schema[name] = section
    print(dump(load(schema, file=file, env=os.environ, overrides=overrides)), end="")
    return EXIT_OK


def reference(*, metrics: bool, as_json: bool) -> int:
    """Prints the reference of the settings, or of the metrics."""
    from fermata_cli.reference import metrics as measured
    from fermata_cli.reference import settings as settable

    topic = measured if metrics else settable
    print(json.dumps(topic.as_data(), indent=2, ensure_ascii=False) + "\n" if as_json else topic.as_markdown(), end="")
    return EXIT_OK


def _required(section: type[Section]) -> list[str]:
    return [name for name, field in section.model_fields.items() if field.is_required()]
