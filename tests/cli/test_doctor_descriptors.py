"""The doctor's reckoning of descriptors, and real loaders, under real limits (``ulimit -n``)."""

import json
import resource
import subprocess
import sys
from typing import Any

import pytest
from small_places import run_in

from shmloader.cli import doctor_checks
from shmloader.cli.doctor_descriptors import USUAL_FIXED, USUAL_PER_WORKER, Descriptors, count_descriptors
from shmloader.cli.doctor_trial import Trial, try_out
from shmloader.host.limits import open_files

STANDARD_STREAMS = 3  # all that a program has open that Python's subprocess started
# The resource tracker is one, the fork server another. Both are there once, and not per worker.
HELPERS = {"fork": 0, "spawn": 1, "forkserver": 2}


def _really_load(start_method: str, num_workers: int, limit: int) -> subprocess.CompletedProcess[str]:
    code = f"from shmloader.cli.doctor_probe import load; load({start_method!r}, 120.0, {num_workers})"
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
def test_what_is_counted_is_what_loaders_need(start_method: str) -> None:
    one, two = (try_out(what, start_method, 120.0) for what in ("load", "load-with-two"))
    assert one.works, one.error
    assert two.works, two.error
    counted = count_descriptors(None, start_method, one, two)
    assert (counted.fixed, counted.per_worker) == (USUAL_FIXED + HELPERS[start_method], USUAL_PER_WORKER)
    limit = STANDARD_STREAMS + counted.needed(3)
    enough = _really_load(start_method, 3, limit)
    assert enough.returncode == 0, enough.stderr
    short = _really_load(start_method, 3, limit - 1)
    assert short.returncode != 0
    assert "Too many open files" in short.stderr


@pytest.mark.long
@pytest.mark.parametrize(("limit", "works"), [(80, True), (64, True), (53, True), (52, False)])
def test_the_verdict_is_what_happens(limit: int, works: bool) -> None:
    """Eight workers were once said to need eight descriptors each, and 80 to be too few."""
    start_method = doctor_checks.default_start_method()
    limit += HELPERS[start_method] + (start_method != "fork")
    loaded = _really_load(start_method, 8, limit)
    assert (loaded.returncode == 0) == works, loaded.stderr
    status, check = _doctor(limit, 8)
    assert (status, check["status"]) == ((0, "warning") if works else (1, "fail"))
    assert works or "enough for 7 workers" in check["change"]


def _worked(descriptors: int | None) -> Trial:
    return Trial(True, {"descriptors": descriptors})


COUNTED = {  # start method, with one worker, with two -> fixed, per worker
    "fork": ("fork", _worked(8), _worked(13), (3, 5)),
    "spawn": ("spawn", _worked(9), _worked(14), (4, 5)),
    "only one could be started": ("fork", _worked(8), Trial(False, error="Too many open files"), (3, 5)),
    "none could": ("fork", Trial(False, error="broken"), None, (3, 5)),
    "no /proc": ("spawn", _worked(None), _worked(None), (3, 5)),
    "a worker costs seven": ("fork", _worked(9), _worked(16), (2, 7)),
}


@pytest.mark.parametrize("case", COUNTED)
def test_two_trials_tell_what_each_worker_takes(case: str) -> None:
    start_method, one, two, expected = COUNTED[case]
    counted = count_descriptors(100, start_method, one, two)
    assert (counted.fixed, counted.per_worker) == expected
    assert counted.to_start == (12 if start_method == "fork" else 13)


@pytest.mark.parametrize(
    ("left", "most"), [(None, None), (0, 0), (14, 0), (15, 1), (19, 1), (20, 2), (49, 7), (50, 8)]
)
def test_workers_that_what_is_left_is_enough_for(left: int | None, most: int | None) -> None:
    descriptors = Descriptors(left)
    assert descriptors.most_workers == most
    if most:
        assert descriptors.needed(most) <= left < descriptors.needed(most + 1)


def _check(left: int, num_workers: int, hard: int | None = None) -> doctor_checks.Check:
    """The check in a process with so many descriptors left, and maybe another hard limit."""
    soft, real_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = open_files().used
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + left, real_hard))
    try:
        with pytest.MonkeyPatch.context() as patch:
            if hard is not None:
                patch.setattr(doctor_checks, "open_files", lambda: open_files()._replace(reachable=hard))
            return doctor_checks.check_open_files(Descriptors(left), num_workers)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, real_hard))


@pytest.mark.parametrize(("left", "status"), [(400, "ok"), (70, "warning"), (30, "warning"), (29, "fail")])
def test_open_files_are_held_against_the_workers(left: int, status: str) -> None:
    check = _check(left, num_workers=4)
    assert check.status == status
    assert (check.values["held"], check.values["needed"]) == (23, 30)
    assert check.change.startswith("" if status == "ok" else "ulimit -n 4096: ")


def test_the_limit_that_is_advised_is_enough() -> None:
    check = _check(100, num_workers=1000, hard=100_000)
    assert check.status == "fail"
    total = int(check.change.split("ulimit -n ")[1].split(":")[0])
    assert Descriptors(total - check.values["used"]).most_workers >= 1000
    low = _check(100, num_workers=1000, hard=4096)
    assert low.change.startswith(f"raise the hard limit (docker run --ulimit nofile={total},")
