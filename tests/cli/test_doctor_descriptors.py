"""The doctor's count of descriptors, compared with real loaders under real limits (``ulimit -n``)."""

import functools
import json
import multiprocessing
import sys
from typing import Any

import pytest
from small_places import run_in

from shmloader.cli.doctor.advice import descriptors_held, descriptors_needed, most_workers
from shmloader.cli.doctor.checks import Finding, Host, check_open_files
from shmloader.memory.limits import Cores, Headroom

OWN = multiprocessing.get_all_start_methods()[0]


@functools.cache
def _open_at_first() -> int:
    """Descriptors of a program that has imported the package: standard streams, and those of libraries."""
    code = "import os, shmloader; print(len(os.listdir('/proc/self/fd')) - 1)"  # the folder itself
    return int(run_in("true", [sys.executable, "-c", code]).stdout)


def _really_load(start_method: str, num_workers: int, limit: int) -> Any:
    code = f"""
import os
from shmloader import DataLoader
before = len(os.listdir("/proc/self/fd"))
loader = DataLoader(range(32), num_workers={num_workers}, multiprocessing_context={start_method!r})
with loader:
    iterator = iter(loader)
    next(iterator)
    print(len(os.listdir("/proc/self/fd")) - before)
    assert sum(1 for _ in iterator) == 31
"""
    return run_in(f"ulimit -n {limit}", [sys.executable, "-c", code])


def _doctor(limit: int, num_workers: int) -> tuple[int, dict[str, Any]]:
    words = [sys.executable, "-m", "shmloader", "doctor", "--json", "--workers", str(num_workers)]
    done = run_in(f"ulimit -n {limit}", words)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["checks"]["open_files"]


@pytest.mark.parametrize(
    "start_method",
    ["fork", *(pytest.param(name, marks=pytest.mark.long) for name in ("spawn", "forkserver"))],
)
def test_what_is_reckoned_is_what_loaders_take(start_method: str) -> None:
    limit = _open_at_first() + descriptors_needed(3, start_method)
    enough = _really_load(start_method, 3, limit)
    assert enough.returncode == 0, enough.stderr
    assert int(enough.stdout) == descriptors_held(3, start_method)
    short = _really_load(start_method, 3, limit - 1)
    assert short.returncode != 0
    assert "Too many open files" in short.stderr


@pytest.mark.long
@pytest.mark.parametrize(("more", "works"), [(30, True), (0, True), (-1, False)])
def test_the_verdict_is_what_happens(more: int, works: bool) -> None:
    """The doctor once said that eight workers need eight descriptors each, and that 80 are too few."""
    limit = _open_at_first() + descriptors_needed(8, OWN) + more
    loaded = _really_load(OWN, 8, limit)
    assert (loaded.returncode == 0) == works, loaded.stderr
    status, check = _doctor(limit, 8)
    assert (status, check["status"]) == ((0, "warning") if works else (1, "fail"))
    assert works or "enough for 7 workers" in check["change"]


@pytest.mark.parametrize(
    ("left", "most"), [(None, None), (0, 0), (14, 0), (15, 1), (19, 1), (20, 2), (49, 7), (50, 8)]
)
def test_workers_that_what_is_left_is_enough_for(left: int | None, most: int | None) -> None:
    assert most_workers(left, "fork") == most
    if most:
        assert descriptors_needed(most, "fork") <= left < descriptors_needed(most + 1, "fork")


def _check(left: int, num_workers: int) -> Finding:
    """The check in a process with so many descriptors left."""
    memory = Headroom(2**33, 2**34, "the machine's memory")
    advice: Any = None  # the check does not look at it
    return check_open_files(
        Host(Cores(4, 4, None), memory, (100, 100 + left), "fork", advice, num_workers, {})
    )


@pytest.mark.parametrize(("left", "status"), [(400, "ok"), (70, "warning"), (30, "warning"), (29, "fail")])
def test_open_files_are_held_against_the_workers(left: int, status: str) -> None:
    check = _check(left, num_workers=4)
    assert check.status == status
    assert (check.values["held"], check.values["needed"]) == (23, 30)
    assert check.change.startswith("" if status == "ok" else "ulimit -n 4096 (")


def test_the_limit_that_is_advised_is_enough() -> None:
    check = _check(100, num_workers=1000)
    assert check.status == "fail"
    total = int(check.change.split("ulimit -n ")[1].split(" ")[0])
    assert most_workers(total - check.values["used"], "fork") >= 1000
    assert f"docker run --ulimit nofile={total}," in check.change
