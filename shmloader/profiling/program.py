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
from collections import deque
from collections.abc import Callable
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import Any

from shmloader.profiling.profile import Profile
from shmloader.profiling.report import ProfileReport

FOLDER = "SHMLOADER_PROFILE"
"""The environment variable with the folder for reports."""

REPLAY = "SHMLOADER_PROFILE_REPLAYS"
"""The environment variable that has each loader give its first batch again and again, if it is not empty."""

_EVERY_S = 1.0
_MOST_AGAIN = 8  # loaders, those that died last
_numbers = itertools.count()
_again: deque[Finalize] = deque()
_profiled: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # what `_profile` was given


def begin(profile_each: Callable[[Callable[[Any], None]], None]) -> None:
    """Profile each loader of this process from now on; `shmloader.loading.profile_each` tells of them."""
    profile_each(_profile)
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_begin_in_forked_child)
        # A process of multiprocessing then drops all finalizers, those for the last reports among them.
        register_after_fork(_profiled, lambda _: _begin_in_forked_child())


def _begin_in_forked_child() -> None:
    """Profile inherited loaders anew: their parent reports on what it has loaded."""
    for loading in list(_profiled.values()):
        loading.counters.forget_profiles()
        if loading.loader() is not None:
            _profile(loading)


def _profile(loading: Any) -> None:
    loader = loading.loader()
    rank = f"rank {os.environ['RANK']}, " if "RANK" in os.environ else ""
    title = f"{rank}pid {os.getpid()}: {type(loader).__name__} over {type(loader.dataset).__name__}"
    number = next(_numbers)
    _profiled[id(loading)] = loading
    path = Path(os.environ[FOLDER], f"{os.getpid()}-{number}.json")
    replays = bool(os.environ.get(REPLAY))
    profile = loading.profile(_EVERY_S, lambda report: _write(path, title, report), replay=replays)
    profile.begin()
    # Or at the end of this process, also of one of multiprocessing, which calls no function of atexit.
    Finalize(loader, _write_twice, (path, title, profile), exitpriority=0)


def _write_twice(*report: Any) -> None:
    """Write the report of a loader that dies, and again at the end: its iterator may outlive it."""
    _write_last(*report)
    if len(_again) == _MOST_AGAIN:
        _again.popleft().cancel()
    _again.append(Finalize(None, _write_last, report, exitpriority=0))


def _write_last(path: Path, title: str, profile: Profile) -> None:
    report = profile.report()
    if report.batches:
        _write(path, title, report)


def _write(path: Path, title: str, report: ProfileReport) -> None:
    """Replace a report's file; a program is not disturbed if the folder is gone or full."""
    figures = {"title": title, **report.as_dict(), "spans": report.last_spans()}
    with contextlib.suppress(OSError):
        whole = path.with_suffix(".new")
        whole.write_text(json.dumps(figures), encoding="utf-8")
        whole.replace(path)


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The reports in a folder, those on the longest loading first."""
    found = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError):
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return sorted(found, key=lambda report: -report["total_s"])
