"""The Python blocks of the pages, as programs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "benchmarks").glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
    ]
)

_BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")


class Block(NamedTuple):
    """A block: its page, line and code, and the files that it may import: earlier blocks that name theirs."""

    page: str
    line: int
    code: str
    files: dict[str, str]


def blocks() -> list[Block]:
    """All blocks that begin with the word python; those in lists without their indentation."""
    found = []
    for page in PAGES:
        text, files = page.read_text(encoding="utf-8"), dict[str, str]()
        for match in _BLOCK.finditer(text):
            code = textwrap.dedent(match[2])
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(str(page.relative_to(REPOSITORY)), line, code, dict(files)))
            if named := _FILE.match(code):
                files[named[1]] = code
    return found
