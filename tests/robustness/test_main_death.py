"""Nothing outlives a main process that was killed, at whatever stage."""

import random

import pytest

from robustness.main_kills import STAGES, kill_once

LOADED_S = 3.0  # what a loaded machine may add to 2 s; `main_kills` as a program holds to the 2 s


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_outlives_a_killed_main_process(stage: str) -> None:
    rng = random.Random(stage)
    kill = kill_once(stage, "fork", rng)
    assert kill.workers == 2 or stage == "starting"
    assert kill.gone_s < 2 + LOADED_S


@pytest.mark.parametrize(("stage", "method"), [("starting", "spawn"), ("holding", "forkserver")])
def test_so_it_is_where_workers_are_not_forked(stage: str, method: str) -> None:
    # A worker that is still importing its modules learns of it when it has done so.
    kill = kill_once(stage, method, random.Random(method))
    assert kill.gone_s < 2 + LOADED_S + 10 * (stage == "starting")


@pytest.mark.parametrize("stage", ["mid-epoch", "holding"])
def test_named_segments_are_removed_too(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOADER_SEGMENT", "portable")
    assert kill_once(stage, "fork", random.Random(stage)).workers == 2
