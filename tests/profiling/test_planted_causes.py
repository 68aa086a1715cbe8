"""A program that is held up by one planted cause is told that cause and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planted_causes import PLANTED
from small_places import cgroup, entering
from warm_python import warm_python

from shmloader.memory.limits import processor_use
from shmloader.verdict import Cause

PROGRAM = str(Path(__file__).parents[1] / "planted_causes.py")
A_TENTH = {"cpu.cfs_quota_us": "10000"}, {"cpu.max": "10000 100000"}


@pytest.mark.in_ci(3)
@pytest.mark.parametrize("cause", [cause for cause in PLANTED if cause is not Cause.THROTTLED])
def test_the_planted_cause_is_named(cause: Cause) -> None:
    command = [*warm_python(), "-W", "ignore", PROGRAM, cause]
    before = processor_use().throttled
    out = subprocess.check_output(command, text=True)
    found, text = json.loads(out)
    if found == Cause.THROTTLED and processor_use().throttled > before:
        pytest.skip("the processor quota of this machine was used up, perhaps by other programs")
    assert found == cause, text


@pytest.mark.in_ci
def test_a_throttled_cgroup_is_named() -> None:
    with cgroup("cpu", *A_TENTH) as folder:
        command = ["bash", "-c", f'{entering(folder)} && exec "$@"', "bash"]
        program = [sys.executable, "-W", "ignore", PROGRAM, Cause.THROTTLED]
        out = subprocess.check_output([*command, *program], text=True)
    found, text = json.loads(out)
    assert found == Cause.THROTTLED, text
    assert "Raise the quota" in text
