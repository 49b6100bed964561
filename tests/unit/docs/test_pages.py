"""The pages hang together: what they link to is there, and settings they show are settings."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from fermata_cli.schema import ALL_SECTIONS
from node_runtime.settings import load
from tests.support.pages import ROOT, blocks, without_blocks

DOCS = sorted((ROOT / "docs").glob("*.md"))
FOLDERS = ("docs", "fermata_cli", "deploy", "examples", "tests", "bench")
PAGES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))]
PAGES += [ROOT / "README.md", ROOT / "CHANGELOG.md"]
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
SETTINGS = [(page, block) for page in DOCS for block in blocks(page) if block.language == "yaml" and not block.note]


def anchors(page: Path) -> set[str]:
    """The ids that a forge gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    found = []
    for match in _LINK.finditer(without_blocks(page)):
        target, _, anchor = unquote(match["target"]).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target) if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            found.append(match["target"])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n[a](page.md#a-page) [b](nowhere.md) [c](#nothing) [d](https://example.org/x)\n")
    assert broken(page) == ["nowhere.md", "#nothing"]


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in DOCS if page.name != "README.md" and f"({page.name})" not in index] == []


@pytest.mark.parametrize(("page", "block"), SETTINGS, ids=lambda value: getattr(value, "name", ""))
def test_settings_that_a_page_shows_are_settings(page: Path, block: object, tmp_path: Path) -> None:
    file = tmp_path / page.with_suffix(".yaml").name
    file.write_text(block.body)  # type: ignore[attr-defined]
    mentioned = {name: ALL_SECTIONS[name] for name in yaml.safe_load(file.read_text())}
    assert load(mentioned, file=file, env={})
