"""A hook of the site's build: llms.txt, made of the tables of docs/index.md, and the pages as Markdown."""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

_ROW = re.compile(r"^\| \[(.+?)\]\((.+?\.md)\) \| (.*) \|$")
_LINK = re.compile(r"\[(.+?)\]\(.+?\)")


def on_post_build(config: Any) -> None:
    """Write what a program reads instead of the site: addresses are relative to llms.txt."""
    source, site = Path(config["docs_dir"]), Path(config["site_dir"])
    lines = ["# shmloader", "", f"> {config['site_description']}"]
    for line in (source / "docs" / "index.md").read_text(encoding="utf-8").splitlines():
        if row := _ROW.match(line):
            title, link, answers = row.groups()
            answers = _LINK.sub(r"\1", answers)
            lines.append(f"- [{title}]({posixpath.normpath(f'docs/{link}')}): {answers}")
        elif line.startswith("For ") and line.endswith(":"):
            lines += ["", f"## {line[:-1]}", ""]
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for page in source.rglob("*.md"):
        shutil.copy(page, site / page.relative_to(source))
