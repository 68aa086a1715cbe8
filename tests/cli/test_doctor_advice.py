"""The doctor's advice: arguments that the host has room for, and none if it has no room."""

import re
from pathlib import Path

import pytest
import torch
from caught_warnings import caught_warnings

from shmloader import DataLoader
from shmloader.cli import doctor
from shmloader.cli.doctor import checks
from shmloader.cli.doctor.advice import Advice, Room, advise, describe_advice, slots_of
from shmloader.cli.doctor.checks import Finding, Host
from shmloader.cli.doctor.trial import Trial
from shmloader.memory import Segment, whole_pages
from shmloader.memory.limits import Cores, Headroom
from shmloader.slots import PlaceTable

REPOSITORY = Path(__file__).parents[2]
MIB = 2**20
GIB = 2**30


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 2), (7, 3)])
def test_slots_are_counted_as_the_table_counts_them(workers: int, prefetch: int) -> None:
    segment = Segment()
    assert slots_of(workers, prefetch) == PlaceTable(segment, workers * prefetch, MIB).budget.base_slots
    segment.close()


ADVICE = {  # cores, MiB available, descriptors, batch in MiB, workers asked -> workers, prefetch, fits
    "one core is left for the main process": ((8, 10_000, None, 1, None), (7, 2, True)),
    "two cores are two workers": ((2, 10_000, None, 1, None), (2, 2, True)),
    "what is asked is given": ((8, 10_000, None, 1, 6), (6, 2, True)),
    "but no more workers than there are cores": ((2, 10_000, None, 1, 8), (2, 2, True)),
    "less is prefetched": ((4, 2 * 9, None, 1, 4), (4, 1, True)),
    "then there are fewer workers": ((4, 2 * 5, None, 1, 4), (3, 1, True)),
    "three slots at the least": ((4, 4, None, 1, 4), (1, 1, True)),
    "which may not fit": ((4, 2, None, 1, 4), (1, 1, False)),
    "descriptors are enough for three": ((4, 10_000, 3 + 2 * 5 + 12 + 4, 1, 4), (3, 2, True)),
    "without a size memory is not looked at": ((4, 1, None, None, 4), (4, 2, True)),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice(case: str) -> None:
    (cores, available, descriptors, batch, asked), (workers, prefetch, fits) = ADVICE[case]
    batch_nbytes = None if batch is None else batch * MIB
    advice = advise(Room(cores, available * MIB, descriptors), batch_nbytes, asked)
    assert (advice.num_workers, advice.prefetch_factor, advice.fits) == (workers, prefetch, fits)
    assert bool(advice.reasons) == ((workers, prefetch) != (asked or workers, 2))
    if batch_nbytes is None:
        assert (advice.slots_nbytes, advice.memory_budget_nbytes) == (None, None)
    elif not fits:
        assert advice.memory_budget_nbytes is None
    else:
        assert advice.slots_nbytes == (workers * prefetch + 2) * batch_nbytes
        expected_nbytes = max(advice.slots_nbytes, min(4 * advice.slots_nbytes, available * MIB // 2))
        assert advice.memory_budget_nbytes == expected_nbytes


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), index)


def test_a_loader_as_advised_takes_the_slot_memory_that_was_said_and_spills_nothing() -> None:
    batch_nbytes = 4 * 1000 * 8 + 400  # four rows of int64, and the header
    advice = advise(Room(cores=2, available_nbytes=2**33), batch_nbytes, asked_workers=2)
    with DataLoader(
        Rows(),
        batch_size=4,
        num_workers=advice.num_workers,
        prefetch_factor=advice.prefetch_factor,
        memory_budget_nbytes=advice.memory_budget_nbytes,
        persistent_workers=True,
    ) as loader:
        batches = [int(batch.sum()) for batch in loader]
        statistics = loader.statistics()
    assert len(batches) == 16
    assert statistics.spills == 0
    assert statistics.largest_batch_nbytes <= batch_nbytes
    assert statistics.reserved_nbytes <= advice.slots_nbytes
    assert statistics.reserved_nbytes >= (advice.slots - 1) * whole_pages(statistics.largest_batch_nbytes)


def test_workers_beyond_the_cores_are_told_of_and_not_advised() -> None:
    advice = advise(Room(cores=2, available_nbytes=2**33), None, asked_workers=8)
    assert "num_workers=2, prefetch_factor=2" in describe_advice(advice)[0]
    assert "if yours do, keep num_workers=8" in describe_advice(advice)[-1]


# --- little room, or none


def _check_memory(memory: Headroom, advice: Advice) -> Finding:
    host = Host(Cores(2, 2, None), memory, (None, None), "fork", advice, advice.num_workers, {})
    return checks.check_memory(host)


def test_where_nothing_fits_nothing_is_advised() -> None:
    advice = advise(Room(cores=2, available_nbytes=22 * GIB), 100 * 10**9, asked_workers=800)
    assert (advice.fits, advice.memory_budget_nbytes) == (False, None)
    text = " ".join(describe_advice(advice))
    assert text.startswith("none: such batches do not fit")
    assert "DataLoader(" not in text
    assert "memory_budget_nbytes" not in text
    assert "4 x 93.1 GiB = 373 GiB" in text
    check = _check_memory(Headroom(22 * GIB, 24 * GIB, "the machine's memory"), advice)
    assert check.status == "fail"
    for said in (text, check.change):
        assert f"at most {advice.largest_batch_nbytes:,} bytes" in said


def test_batches_of_the_size_that_is_named_do_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "oom_kills", lambda: 0)
    memory = Headroom(22 * GIB + 4097, 24 * GIB, "the machine's memory")
    room = Room(cores=2, available_nbytes=memory.available_nbytes)
    named = advise(room, 100 * 10**9, asked_workers=800).largest_batch_nbytes
    for nbytes, status in [(named, "ok"), (named + 1, "warning")]:
        advice = advise(room, nbytes, asked_workers=800)
        assert advice.fits
        assert _check_memory(memory, advice).status == status
        assert (advice.memory_budget_nbytes <= memory.available_nbytes // 2) == (status == "ok")
    assert f"at most {named:,} bytes" in _check_memory(memory, advice).change


class Large(torch.utils.data.Dataset[torch.Tensor]):
    """A sample is 16 MiB."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16 * MIB,), index, dtype=torch.uint8)


def test_what_fits_is_what_a_loader_makes_without_copies() -> None:
    """The advised budget is tried, and one with a page less."""
    nbytes = 16 * MIB + 400
    advice = advise(Room(cores=1, available_nbytes=8 * nbytes), nbytes, asked_workers=1)
    assert advice.fits
    for budget_nbytes, fits in [(advice.slots_nbytes, True), (advice.slots_nbytes - 4096, False)]:
        loader = DataLoader(
            Large(),
            num_workers=1,
            prefetch_factor=advice.prefetch_factor,
            memory_budget_nbytes=budget_nbytes,
        )
        with caught_warnings() as caught, loader:
            assert sum(1 for _ in loader) == 6
            assert (loader.statistics().spills == 0) is fits
        assert len(caught) == (not fits)


def test_cores_are_held_against_the_workers_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory may be enough for fewer workers; the check is about the wanted number."""
    trial = Trial(True, {"batches": 4, "batch_nbytes": MIB, "first_batch_s": 0.1})
    monkeypatch.setattr(doctor, "try_loading", lambda *arguments: trial)
    monkeypatch.setattr(doctor, "cores", lambda: Cores(2, 2, None))
    report = doctor.examine(10**15, 800, 60.0)
    (finding,) = (finding for check, finding in report.findings if check.name == "cores")
    assert report.advice.num_workers == 1
    assert finding.status == "warning"
    assert "800 workers share 2" in finding.change


def test_the_page_says_what_is_advised_where_nothing_fits() -> None:
    page = re.sub(r"\s+", " ", (REPOSITORY / "docs" / "doctor.md").read_text(encoding="utf-8"))
    assert "nothing is advised" in page
    assert "statistics().largest_batch_nbytes` says" in page
    assert "header included" in page
