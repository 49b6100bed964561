"""docs/settings.md says what the settings classes accept and nothing else."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fermata_cli.main import main
from fermata_cli.reference import settings as reference
from fermata_cli.schema import ALL_SECTIONS
from node_runtime.settings import Section, SettingKey, SettingsError, load, schema_keys, schema_sections

DOCS = Path(__file__).parents[3] / "docs"
KEYS = schema_keys(ALL_SECTIONS)
NEEDED = ("rollout.model=m", "trainer.model=m", "trainer.train_tasks=t", "trainer.rollout_nodes=['127.0.0.1:1']")
SINGLE = [key for key in KEYS if not set(key.key) & set("[<")]


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    hint = "run: .venv/bin/fermata config reference > docs/settings.md"
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == capsys.readouterr().out, hint


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.key)
def test_every_key_is_described(key: SettingKey) -> None:
    assert key.description.strip(), f"{key.key} has no description: give its Field one"


@pytest.mark.parametrize("found", schema_sections(ALL_SECTIONS), ids=lambda found: found[0])
def test_every_section_is_described(found: tuple[str, type[Section]]) -> None:
    path, model = found
    assert model.__dict__.get("__doc__"), f"{path}: {model.__name__} has no docstring"


def test_every_key_stands_in_the_page_once() -> None:
    rows = [line.split("`")[1] for line in (DOCS / "settings.md").read_text().splitlines() if line.startswith("| `")]
    rows = [row for row in rows if "." in row]
    assert sorted(rows) == sorted(key.key for key in KEYS)


def test_variables_and_defaults_of_the_reference_are_those_that_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["key"] for row in told] == [key.key for key in KEYS]
    given = {r["variable"]: json.dumps(r["default"]) for r in told if r["variable"] and not r["required"]}
    assert len(given) > 100
    assert load(ALL_SECTIONS, file=None, env=given, overrides=NEEDED) == load(
        ALL_SECTIONS, file=None, env={}, overrides=NEEDED
    )
    assert {f"{r['key']}" for r in told if r["required"] and r["variable"]} == {n.split("=")[0] for n in NEEDED}


def outside(key: SettingKey) -> Iterator[Any]:
    """Values just beyond each bound."""
    step = 1 if key.type.startswith("integer") else 1e-9
    for name, value in key.bounds.items():
        match name:
            case "minimum":
                yield value - step
            case "maximum":
                yield value + step if step == 1 else math.nextafter(value, math.inf)
            case "exclusiveMinimum" | "exclusiveMaximum":
                yield value
            case "minLength":
                yield "x" * (value - 1)
            case "maxLength":
                yield "x" * (value + 1)
            case "minItems":
                yield [1.0] * (value - 1)
            case "maxItems":
                yield [1.0] * (value + 1)


@pytest.mark.parametrize("key", [key for key in SINGLE if key.bounds], ids=lambda key: key.key)
def test_what_lies_beyond_a_bound_is_refused(key: SettingKey) -> None:
    values = list(outside(key))
    assert values, f"{key.key}: no value was found beyond {dict(key.bounds)}"
    for value in values:
        with pytest.raises(SettingsError, match=re.escape(key.key)):
            load(ALL_SECTIONS, file=None, env={}, overrides=[*NEEDED, f"{key.key}={json.dumps(value)}"])


def test_a_table_keeps_its_columns_whatever_a_cell_holds() -> None:
    assert reference.table(("a", "b"), [("x|y", "two\nlines")])[2] == "| x\\|y | two lines |"
