"""Slots get huge pages where the host has them, and never more memory than was asked for."""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import Numbered

from shmloader import DataLoader, SharedMemoryExhausted
from shmloader.segment import PAGE_NBYTES, MemfdSegment, huge_pages
from shmloader.segment.huge_pages import HUGE_NBYTES

SMALL_END = 3 * PAGE_NBYTES


@pytest.fixture
def segment(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemfdSegment]:
    monkeypatch.setattr(huge_pages, "_refused", False)
    segment = MemfdSegment()
    yield segment
    segment.close(2)


def _reserved_nbytes(segment: MemfdSegment) -> int:
    return os.fstat(segment._descriptor.fd).st_blocks * 512


def _huge_nbytes() -> int:
    """How much of slots this process has mapped by huge pages."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    slots = [mapping for mapping in mappings if "memfd:shmloader-slots" in mapping]
    return sum(int(match[1]) << 10 for each in slots if (match := re.search(r"ShmemPmdMapped: +(\d+)", each)))


@pytest.fixture
def has_huge_pages(segment: MemfdSegment) -> None:
    """Skip where the host has none, or just now no whole piece of memory."""
    segment.reserve(1, 0, 0, HUGE_NBYTES)
    if huge_pages._refused:
        pytest.skip("the host gives no huge pages")
    segment.discard(1, 0, HUGE_NBYTES)


def test_whole_parts_are_huge_and_the_rest_is_not(segment: MemfdSegment, has_huge_pages: None) -> None:
    nbytes = 2 * HUGE_NBYTES + SMALL_END
    assert segment.reserve(0, 0, 0, nbytes - 5) == (0, nbytes)
    assert _reserved_nbytes(segment) == nbytes
    extent = segment.map(0, 0, nbytes)
    assert extent.address % HUGE_NBYTES == 0
    array = np.frombuffer(extent.buffer, np.uint8)
    assert not array.any()
    array[:] = 7
    assert _huge_nbytes() == 2 * HUGE_NBYTES
    assert _reserved_nbytes(segment) == nbytes


def test_a_slot_that_grows_keeps_its_contents(segment: MemfdSegment, has_huge_pages: None) -> None:
    held = HUGE_NBYTES + SMALL_END
    segment.reserve(0, 0, 0, held)
    before = np.frombuffer(segment.map(0, 0, held).buffer, np.uint32)
    before[:] = np.arange(len(before))
    segment.reserve(0, 0, held, 4 * HUGE_NBYTES)
    after = np.frombuffer(segment.map(0, 0, 4 * HUGE_NBYTES).buffer, np.uint32)
    assert (after[: len(before)] == np.arange(len(before))).all()
    assert not after[len(before) :].any()
    before[0] = 99
    assert after[0] == 99
    del before
    assert _huge_nbytes() == 4 * HUGE_NBYTES
    assert _reserved_nbytes(segment) == 4 * HUGE_NBYTES


def test_a_part_of_a_huge_page_can_be_given_back(segment: MemfdSegment, has_huge_pages: None) -> None:
    segment.reserve(0, 0, 0, 3 * HUGE_NBYTES)
    np.frombuffer(segment.map(0, 0, 3 * HUGE_NBYTES).buffer, np.uint8)[:] = 7
    segment.discard(0, 0, 3 * HUGE_NBYTES, HUGE_NBYTES + PAGE_NBYTES)
    assert _reserved_nbytes(segment) == HUGE_NBYTES + PAGE_NBYTES
    segment.discard(0, 0, HUGE_NBYTES + PAGE_NBYTES)
    assert _reserved_nbytes(segment) == 0


def test_small_slots_take_small_pages(segment: MemfdSegment) -> None:
    nbytes = HUGE_NBYTES - PAGE_NBYTES
    segment.reserve(0, 0, 0, nbytes)
    np.frombuffer(segment.map(0, 0, nbytes).buffer, np.uint8)[:] = 1
    assert _huge_nbytes() == 0
    assert _reserved_nbytes(segment) == nbytes


@pytest.mark.parametrize("held", [0, HUGE_NBYTES + SMALL_END])
def test_a_reservation_that_fails_leaves_what_there_was(segment: MemfdSegment, held: int) -> None:
    if held:
        segment.reserve(0, 0, 0, held)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * HUGE_NBYTES, limits[1]))
    try:
        with pytest.raises(SharedMemoryExhausted, match="ulimit -f"):
            segment.reserve(0, 0, held, 8 * HUGE_NBYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _reserved_nbytes(segment) == held


def test_a_host_without_huge_pages_is_asked_once(
    segment: MemfdSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 9999)  # a call that no kernel has
    for slot in range(2):
        assert segment.reserve(slot, 0, 0, 2 * HUGE_NBYTES) == (0, 2 * HUGE_NBYTES)
        assert huge_pages._refused
    np.frombuffer(segment.map(0, 0, 2 * HUGE_NBYTES).buffer, np.uint8)[:] = 1
    assert _huge_nbytes() == 0
    assert _reserved_nbytes(segment) == 4 * HUGE_NBYTES


def test_without_address_space_to_align_in_a_slot_is_mapped_all_the_same(segment: MemfdSegment) -> None:
    nbytes = 64 * HUGE_NBYTES
    segment.reserve(0, 0, 0, nbytes)
    used_nbytes = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_NBYTES
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_nbytes + nbytes + HUGE_NBYTES // 2, limits[1]))
    try:
        extent = segment.map(0, 0, nbytes)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert extent.nbytes == nbytes


def test_batches_lie_in_huge_pages_in_the_main_process(has_huge_pages: None) -> None:
    with DataLoader(Numbered(32, items=1 << 17), batch_size=4, num_workers=1) as loader:
        batches = iter(loader)
        first = next(batches)
        assert torch.equal(first[3], torch.full((1 << 17,), 3))
        assert _huge_nbytes() >= HUGE_NBYTES
        now = loader.statistics()
        assert now.reserved_nbytes <= 4 * (2 * HUGE_NBYTES + (1 << 16))
