"""The profiles of all loaders of a program that runs with ``SHMLOADER_PROFILE=FOLDER`` in its environment.

`shmloader` imports this module only then. Each process that loads writes a report on each of its loaders to
the folder, a JSON file that is replaced every second or so, and when the loader or the program ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmloader.profiling.profile import Profile
from shmloader.profiling.report import ProfileReport

FOLDER = "SHMLOADER_PROFILE"
"""The environment variable with the folder for reports."""

_EVERY_S = 1.0
_numbers = itertools.count()


def begin(profile_each: Callable[[Callable[[Any], None]], None]) -> None:
    """Profile each loader of this process from now on; `shmloader.loading.profile_each` tells of them."""
    profile_each(_profile)


def _profile(loading: Any) -> None:
    loader = loading.loader()
    rank = f"rank {os.environ['RANK']}, " if "RANK" in os.environ else ""
    title = f"{rank}pid {os.getpid()}: {type(loader).__name__} over {type(loader.dataset).__name__}"
    path = Path(os.environ[FOLDER], f"{os.getpid()}-{next(_numbers)}.json")
    profile = loading.profile(_EVERY_S, lambda report: _write(path, title, report))
    profile.begin()
    weakref.finalize(loader, _finish, os.getpid(), path, title, profile)  # or at the interpreter's end


def _finish(owner_pid: int, path: Path, title: str, profile: Profile) -> None:
    report = profile.report() if os.getpid() == owner_pid else None
    if report is not None and report.batches:
        _write(path, title, report, spans=report.last_spans())


def _write(path: Path, title: str, report: ProfileReport, **more: Any) -> None:
    """Replace a report's file; a program is not disturbed if the folder is gone or full."""
    with contextlib.suppress(OSError):
        whole = path.with_suffix(".new")
        whole.write_text(json.dumps({"title": title, **report.as_dict(), **more}), encoding="utf-8")
        whole.replace(path)


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The reports in a folder, those on the longest loading first."""
    found = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError):
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return sorted(found, key=lambda report: -report["total_s"])
