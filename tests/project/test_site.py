"""The site: its navigation has all pages, it builds with links checked, and search knows each message."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"


def test_the_navigation_has_every_page() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"([\w./-]+\.md)$", text, re.MULTILINE)
    pages = {str(page.relative_to(REPOSITORY)) for page in DOCS.rglob("*.md")}
    decisions = {page for page in pages if re.search(r"decisions/\d", page)}  # their list has them
    assert sorted(listed) == sorted([*(pages - decisions), "README.md", "CHANGELOG.md", "examples/README.md"])


def test_the_site_builds_and_each_message_is_a_heading_that_search_finds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    source = tmp_path / "build" / "site-source"
    source.mkdir(parents=True)
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("docs", "examples", "benchmarks"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    index = json.loads(
        (tmp_path / "build" / "site" / "search" / "search_index.json").read_text(encoding="utf-8")
    )
    titles = {" ".join(entry["title"].split()) for entry in index["docs"]}
    page = (DOCS / "messages.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert len(headings) > 20
    assert not [heading for heading in headings if heading.replace("&", "&amp;") not in titles]
