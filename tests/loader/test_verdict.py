"""The verdict names one cause, by what is known of cores, autotune, held slots and quotas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shmloader import AutotuneReport, LoaderStatistics
from shmloader.verdict import Cause, Evidence, Profiled, judge

WAITS = Evidence(
    batches=500, total_s=40.0, wait_s=30.0, num_workers=2, usable_cores=8, made_s=78.0, own_cores=2.0
)
"""A loop that waits for two busy workers, on eight cores."""
NOTHING = Profiled(
    step_s=10.0, sampler_s=0.0, next_s=0.1, fetch_s=78.0, collate_s=0.0, write_s=0.0, cpu_s=70.0, delay_s=0.0
)


def cause(**changes: Any) -> Cause:
    return judge(replace(WAITS, **changes)).cause


def test_more_workers_are_advised_where_there_are_cores_for_them() -> None:
    verdict = judge(WAITS)
    assert verdict.cause is Cause.TOO_FEW
    assert verdict.text.endswith(
        "there are too few: 2 busy worker(s), and there are 8 cores; num_workers=3 would help."
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_workers": 8, "usable_cores": 2, "own_cores": 1.9, "made_s": 300.0}, Cause.TOO_MANY),
        ({"num_workers": 8, "usable_cores": 2, "own_cores": 0.5, "made_s": 300.0}, Cause.WORKERS),
        ({"own_cores": 7.9}, Cause.WORKERS),
        ({"own_cores": 2.0, "foreign_cores": 5.9}, Cause.WORKERS),
        ({"usable_cores": 2}, Cause.WORKERS),
        ({"autotune": "with 2 workers each takes longer for a batch"}, Cause.WORKERS),
        ({"held": 66, "slots": 70}, Cause.HELD),
        ({"held": 10, "slots": 12, "spills": 300}, Cause.HELD),
        ({"batches": 8, "total_s": 0.082, "wait_s": 0.06}, Cause.TOO_LITTLE),
        ({"throttled_share": 0.5}, Cause.THROTTLED),
        ({"wait_s": 2.0}, Cause.PROGRAM),
        ({"wait_s": 2.0, "throttled_share": 0.5}, Cause.PROGRAM),
    ],
)
def test_more_workers_are_not_advised_where_they_would_not_help(
    changes: dict[str, Any], expected: Cause
) -> None:
    verdict = judge(replace(WAITS, **changes))
    assert verdict.cause is expected
    assert "more workers or" not in verdict.text
    assert "too few" not in verdict.text


def test_workers_that_keep_up_after_the_first_batches_are_not_blamed() -> None:
    kept_up = judge(replace(WAITS, wait_s=6.0, first_s=5.0))
    assert kept_up.cause is Cause.FIRST_BATCH
    assert "of 40.0 s (15%), 5.0 s of it for them; after them your loop is." in kept_up.text
    for wait_s, first_s in (18.0, 10.0), (39.0, 39.0):  # 8 of the other 30 s; hardly any time was left
        assert "your loop" not in judge(replace(WAITS, wait_s=wait_s, first_s=first_s)).text


def test_workers_that_are_idle_are_not_asked_for_quicker_samples() -> None:
    uneven = judge(replace(WAITS, wait_s=8.0, made_s=40.0))
    assert uneven.cause is Cause.UNEVEN
    assert "although workers were busy for only 50% of the time" in uneven.text
    assert "quicker samples" not in uneven.text
    assert cause(wait_s=8.0, made_s=0.0, own_cores=7.9) is Cause.WORKERS  # it is not known what they took


def test_the_choice_of_auto_is_quoted() -> None:
    why = "with 2 workers each takes longer for a batch"
    assert why in judge(replace(WAITS, autotune=why)).text


@pytest.mark.parametrize(("alone_s", "expected"), [(15.0, Cause.FOREIGN), (60.0, Cause.FETCH)])
def test_other_programs_are_blamed_only_if_the_workers_would_keep_up_without_them(
    alone_s: float, expected: Cause
) -> None:
    profiled = replace(NOTHING, cpu_s=alone_s, delay_s=78.0 - alone_s)
    assert cause(usable_cores=2, foreign_cores=1.5, profiled=profiled) is expected


def test_shares_are_of_what_was_measured_and_busy_workers_of_all() -> None:
    """Of an epoch that was begun before the profile, a part or all is not measured."""
    none = replace(NOTHING, fetch_s=0.0, cpu_s=0.0)
    others = {"usable_cores": 2, "foreign_cores": 1.5}
    assert cause(**others, profiled=none) is Cause.WORKERS
    assert "A profile of more epochs says" in judge(replace(WAITS, usable_cores=2, profiled=none)).text
    half = replace(NOTHING, fetch_s=39.0, cpu_s=39.0)
    assert "39.0 s of 39.0 s (100%)" in judge(replace(WAITS, usable_cores=2, profiled=half)).text
    assert cause(**others, profiled=replace(half, cpu_s=7.5, delay_s=31.5)) is Cause.FOREIGN
    assert cause(**others, profiled=replace(half, cpu_s=20.0, delay_s=19.0)) is Cause.FETCH
    assert cause(profiled=replace(half, excess_s=20.0)) is Cause.SLOW_SAMPLE
    assert cause(profiled=replace(half, fetch_s=24.0, write_s=15.0)) is Cause.COPIED


def test_workers_that_wait_for_a_disk_need_no_cores() -> None:
    waiting = replace(NOTHING, cpu_s=5.0)
    assert cause(foreign_cores=5.9, profiled=waiting) is Cause.TOO_FEW
    assert cause(foreign_cores=5.9, profiled=NOTHING) is Cause.FETCH


def test_auto_that_still_measures_is_asked_for_no_other_number() -> None:
    measuring = judge(replace(WAITS, autotune="still measuring; 12 batches", is_settled=False))
    assert measuring.cause is Cause.WORKERS
    assert measuring.text.endswith("num_workers='auto' has 2 so far (still measuring; 12 batches).")


def test_more_workers_for_a_stream_have_to_divide_it() -> None:
    few = judge(replace(WAITS, is_undivided=True)).text
    assert few.endswith(
        'num_workers=3 would help, if the dataset divides itself among workers; shard="auto" does that.'
    )
    none = Evidence(batches=500, total_s=40.0, in_process_s=30.0)
    assert judge(none).text.endswith("num_workers=1 or more would save that.")
    assert judge(replace(none, is_undivided=True)).text.endswith("num_workers=1 would save that.")
    assert "num_workers=2 is enough" in judge(replace(WAITS, throttled_share=0.5)).text


BUSY = LoaderStatistics(
    batches=500, iterating_s=40.0, wait_for_workers_s=30.0, workers_made_s=78.0, num_workers=2
)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (AutotuneReport(2, 2, True, 40, "measured", chooses_workers=False), Cause.TOO_FEW),
        (AutotuneReport(2, 2, False, 40, "still measuring", chooses_workers=False), Cause.TOO_FEW),
        (AutotuneReport(2, 2, True, 40, "measured"), Cause.WORKERS),
        (AutotuneReport(2, 2, False, 40, "still measuring"), Cause.WORKERS),
    ],
)
def test_auto_is_named_only_where_it_chooses_the_number_of_workers(
    report: AutotuneReport, expected: Cause
) -> None:
    figures = replace(BUSY, usable_cores=8, autotune=report)
    assert judge(figures.evidence()).cause is expected
    assert ("'auto'" in figures.verdict) == (expected is Cause.WORKERS)


def test_statistics_pass_on_what_they_know() -> None:
    report = AutotuneReport(2, 2, True, 40, "one worker for each of 2 usable cores")
    figures = replace(BUSY, autotune=report)
    assert report.why in figures.verdict
    assert "66 batches in 70 slots" in replace(figures, slots_leased=66, slots_free=4).verdict
    assert "used up in 50% of" in replace(figures, throttled_share=0.5, usable_cores=1).verdict
