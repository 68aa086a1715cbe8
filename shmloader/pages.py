"""Paths of the pages of the documentation: in the checkout, or where pip has installed them."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path


def page(name: str) -> str:
    """The path of a page such as ``"docs/messages.md"``; the name alone, if the pages are not there."""
    checkout = Path(__file__).parents[1]
    if (checkout / "mkdocs.yml").is_file():
        return str(checkout / name)
    try:
        files = metadata.files("shmloader") or []
    except (metadata.PackageNotFoundError, OSError):  # not installed; no descriptor left to look
        return name
    found = (file for file in files if file.as_posix().endswith(f"share/doc/shmloader/{name}"))
    return next((str(Path(str(file.locate())).resolve()) for file in found), name)
