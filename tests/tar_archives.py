"""Tar archives for tests."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Members = Iterable[tuple[str, bytes]]


def write(path: Path, members: Members, **options: Any) -> Path:
    """An archive with files of these names and contents."""
    with tarfile.open(path, "w", **options) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def members_of(count: int, begin: int = 0) -> list[tuple[str, bytes]]:
    """The members of samples with a number, a text, JSON and bytes."""
    found: list[tuple[str, bytes]] = []
    for number in range(begin, begin + count):
        name = f"part/{number:05}"
        found += [
            (f"{name}.cls", f"{number % 10}\n".encode()),
            (f"{name}.txt", f"text {number} ä".encode()),
            (f"{name}.json", json.dumps({"n": number}).encode()),
            (f"{name}.seg.bin", bytes([number % 256]) * (number * 37 % 1500)),
        ]
    return found
