"""Slots and stores get huge pages if the host has them, and never more memory than they need."""

import ctypes
import errno
import mmap
import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loading import Numbered

from shmloader import DataLoader, SharedMemoryExhausted, share
from shmloader.memory import PAGE_NBYTES, Segment, huge_pages
from shmloader.memory.huge_pages import HUGE_NBYTES
from shmloader.memory.mapping import libc, map_aligned
from shmloader.store import sealed_buffer
from shmloader.store.sealed_buffer import BufferBuilder

SMALL_END = 3 * PAGE_NBYTES


@pytest.fixture
def segment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Segment]:
    monkeypatch.setattr(huge_pages, "_refused", False)
    segment = Segment()
    yield segment
    segment.close()


def _reserved_nbytes(segment: Segment) -> int:
    return os.fstat(segment._descriptor.fd).st_blocks * 512


def _huge_nbytes(name: str = "slots") -> int:
    """Bytes of slots, or of stores, that this process maps with huge pages."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    found = [mapping for mapping in mappings if f"memfd:shmloader-{name}" in mapping]
    kinds = r"(?:Shmem|File)PmdMapped: +(\d+)"
    return sum(int(nbytes) << 10 for mapping in found for nbytes in re.findall(kinds, mapping))


_refusals: list[int] = []  # error numbers of the host's answers in the present test


def _assert_huge(least: int, most: int | None = None, name: str = "slots") -> None:
    """So many bytes are huge; skips if they are fewer because the host has refused some for now."""
    found = _huge_nbytes(name)
    if found < least and _refusals:
        pytest.skip(f"the host gave no more huge pages: {os.strerror(_refusals[0])}")
    assert least <= found <= (most or least)


@pytest.fixture
def has_huge_pages(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip if the host has none, or at present no memory in one piece."""

    def noted(*arguments: int) -> int:
        answer: int = libc.madvise(*arguments)
        if answer != 0 and (number := ctypes.get_errno()) != errno.EINVAL:  # which is a fault of ours
            _refusals.append(number)
        return answer

    _refusals.clear()
    monkeypatch.setattr(huge_pages, "libc", SimpleNamespace(madvise=noted))
    segment.reserve(1, 0, HUGE_NBYTES)
    if huge_pages._refused:
        pytest.skip("the host gives no huge pages")
    segment.discard(1, HUGE_NBYTES)


@pytest.fixture
def aligns_mappings(has_huge_pages: None) -> None:
    """Skip if the kernel does not align mappings of whole huge pages (Linux before 6.7)."""
    with mmap.mmap(-1, 4 * HUGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        if address % HUGE_NBYTES:
            pytest.skip("the kernel does not align mappings, so stores' huge pages are mapped as small ones")


def test_whole_parts_are_huge_and_the_rest_is_not(segment: Segment, has_huge_pages: None) -> None:
    nbytes = 2 * HUGE_NBYTES + SMALL_END
    assert segment.reserve(0, 0, nbytes - 5) == nbytes
    assert _reserved_nbytes(segment) == nbytes
    extent = segment.map(0, nbytes)
    assert extent.address % HUGE_NBYTES == 0
    array = np.frombuffer(extent.buffer, np.uint8)
    assert not array.any()
    array[:] = 7
    _assert_huge(2 * HUGE_NBYTES)
    assert _reserved_nbytes(segment) == nbytes


def test_a_slot_that_grows_keeps_its_contents(segment: Segment, has_huge_pages: None) -> None:
    held = HUGE_NBYTES + SMALL_END
    segment.reserve(0, 0, held)
    before = np.frombuffer(segment.map(0, held).buffer, np.uint32)
    before[:] = np.arange(len(before))
    segment.reserve(0, held, 4 * HUGE_NBYTES)
    after = np.frombuffer(segment.map(0, 4 * HUGE_NBYTES).buffer, np.uint32)
    assert (after[: len(before)] == np.arange(len(before))).all()
    assert not after[len(before) :].any()
    before[0] = 99
    assert after[0] == 99
    del before
    _assert_huge(4 * HUGE_NBYTES)
    assert _reserved_nbytes(segment) == 4 * HUGE_NBYTES


def test_a_part_of_a_huge_page_can_be_given_back(segment: Segment, has_huge_pages: None) -> None:
    segment.reserve(0, 0, 3 * HUGE_NBYTES)
    np.frombuffer(segment.map(0, 3 * HUGE_NBYTES).buffer, np.uint8)[:] = 7
    segment.discard(0, 3 * HUGE_NBYTES, HUGE_NBYTES + PAGE_NBYTES)
    assert _reserved_nbytes(segment) == HUGE_NBYTES + PAGE_NBYTES
    segment.discard(0, HUGE_NBYTES + PAGE_NBYTES)
    assert _reserved_nbytes(segment) == 0


def test_small_slots_take_small_pages(segment: Segment) -> None:
    nbytes = HUGE_NBYTES - PAGE_NBYTES
    segment.reserve(0, 0, nbytes)
    np.frombuffer(segment.map(0, nbytes).buffer, np.uint8)[:] = 1
    assert _huge_nbytes() == 0
    assert _reserved_nbytes(segment) == nbytes


@pytest.mark.parametrize("held", [0, HUGE_NBYTES + SMALL_END])
def test_a_reservation_that_fails_leaves_what_there_was(segment: Segment, held: int) -> None:
    if held:
        segment.reserve(0, 0, held)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * HUGE_NBYTES, limits[1]))
    try:
        with pytest.raises(SharedMemoryExhausted, match="ulimit -f"):
            segment.reserve(0, held, 8 * HUGE_NBYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _reserved_nbytes(segment) == held


def test_a_host_without_huge_pages_is_asked_once(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 9999)  # a call that no kernel has
    for slot in range(2):
        assert segment.reserve(slot, 0, 2 * HUGE_NBYTES) == 2 * HUGE_NBYTES
        assert huge_pages._refused
    np.frombuffer(segment.map(0, 2 * HUGE_NBYTES).buffer, np.uint8)[:] = 1
    assert _huge_nbytes() == 0
    assert _reserved_nbytes(segment) == 4 * HUGE_NBYTES


def test_without_address_space_to_align_in_a_slot_is_mapped_all_the_same(segment: Segment) -> None:
    nbytes = 64 * HUGE_NBYTES
    segment.reserve(0, 0, nbytes)
    used_nbytes = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_NBYTES
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_nbytes + nbytes + HUGE_NBYTES // 2, limits[1]))
    try:
        extent = segment.map(0, nbytes)
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


@pytest.mark.parametrize(("answer", "asked_again"), [(errno.ENOMEM, True), (errno.EINVAL, False)])
def test_a_passing_shortage_is_not_remembered(
    segment: Segment, monkeypatch: pytest.MonkeyPatch, answer: int, asked_again: bool
) -> None:
    def refuse(*_: int) -> int:
        ctypes.set_errno(answer)
        return -1

    with monkeypatch.context() as patch:
        patch.setattr(huge_pages, "libc", SimpleNamespace(madvise=refuse))
        segment.reserve(0, 0, 2 * HUGE_NBYTES)
    assert huge_pages._refused is not asked_again
    assert _reserved_nbytes(segment) == 2 * HUGE_NBYTES


def test_a_child_that_is_forked_meanwhile_does_not_stop_the_sealing(
    has_huge_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[int] = []

    def map_and_fork(*arguments: int) -> tuple[SimpleNamespace, int]:
        mapping, address = map_aligned(*arguments)

        def fork_first() -> None:  # as another thread may
            if not (pid := os.fork()):
                signal.pause()
            children.append(pid)
            mapping.close()

        return SimpleNamespace(close=fork_first), address

    monkeypatch.setattr(huge_pages, "map_aligned", map_and_fork)
    try:
        assert share(torch.ones(HUGE_NBYTES, dtype=torch.uint8))[5].item() == 1
        assert children
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_what_an_error_leaves_reserved_is_given_back() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with BufferBuilder() as out:
        out.append(np.ones(HUGE_NBYTES, np.uint8))
        reserved_nbytes = out.reserved_nbytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * HUGE_NBYTES, limits[1]))
        try:
            with pytest.raises(SharedMemoryExhausted):
                out.reserve(8 * HUGE_NBYTES)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.fstat(out._fd).st_blocks * 512 == reserved_nbytes
        assert np.frombuffer(out.seal().view, np.uint8).all()


def test_stores_lie_in_huge_pages_and_take_no_more_than_their_size(
    aligns_mappings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_MOST_PIECE_S", 1000.0)
    before = _huge_nbytes("store")
    rows = torch.arange(3 * HUGE_NBYTES // 4 + 100, dtype=torch.int32).reshape(-1, 4)
    store = share(rows)
    assert torch.equal(store, rows)
    _assert_huge(before + 3 * HUGE_NBYTES, name="store")


def test_a_store_that_grows_bit_by_bit_has_huge_pages_too(
    aligns_mappings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_MOST_PIECE_S", 1000.0)
    before = _huge_nbytes("store")
    piece = np.arange(1 << 18, dtype=np.uint32)
    with BufferBuilder() as out:
        for number in range(12):  # of 1 MiB each
            out.append(piece + number)
        assert os.fstat(out._fd).st_blocks * 512 == out.reserved_nbytes
        buffer = out.seal()
    contents = np.frombuffer(buffer.view, np.uint32).reshape(12, -1)
    assert (contents == piece + np.arange(12, dtype=np.uint32)[:, None]).all()
    # The huge page in which it ends was cut.
    assert os.fstat(buffer.fd).st_blocks * 512 == buffer.nbytes
    _assert_huge(before + 4 * HUGE_NBYTES, before + buffer.nbytes, "store")


def test_what_is_written_to_a_store_in_huge_pages_stays_in_this_process(aligns_mappings: None) -> None:
    before = _huge_nbytes("store")
    store = share(torch.zeros(2 * HUGE_NBYTES, dtype=torch.uint8))
    assert _huge_nbytes("store") > before
    if not (pid := os.fork()):
        store[5].add_(1)  # torch knows no read-only tensors
        os._exit(0 if int(store[5]) == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert int(store[5]) == 0


def test_a_host_that_takes_long_is_not_asked_for_the_rest(
    segment: Segment, has_huge_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_MOST_PIECE_S", -1.0)
    monkeypatch.setattr(huge_pages, "_PIECE_NBYTES", 2 * HUGE_NBYTES)
    nbytes = 5 * HUGE_NBYTES
    segment.reserve(0, 0, nbytes)
    extent = segment.map(0, nbytes)
    np.frombuffer(extent.buffer, np.uint8)[:] = 1
    _assert_huge(2 * HUGE_NBYTES)
    assert _reserved_nbytes(segment) == nbytes
    assert not huge_pages._refused


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that takes too long for each piece of four mebibytes."""
    monkeypatch.setattr(huge_pages, "_MOST_PIECE_S", -1.0)
    monkeypatch.setattr(huge_pages, "_PIECE_NBYTES", 2 * HUGE_NBYTES)


def _sealed_nbytes() -> int:
    """Bytes in huge pages of a store that was built after the host took too long."""
    before = _huge_nbytes("store")
    with BufferBuilder() as out:
        for huge in (4, 12):
            out.reserve(huge * HUGE_NBYTES)
        out.append(np.arange(3 * HUGE_NBYTES, dtype=np.uint32))
        buffer = out.seal()
    assert (np.frombuffer(buffer.view, np.uint32) == np.arange(3 * HUGE_NBYTES)).all()
    assert os.fstat(buffer.fd).st_blocks * 512 == buffer.nbytes
    return _huge_nbytes("store") - before


def test_a_store_asks_no_more_once_that_has_taken_long(
    aligns_mappings: None, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_buffer, "_HUGE_SHARE", -1.0)
    monkeypatch.setattr(sealed_buffer, "_LEAST_HUGE_S", -1.0)
    assert _sealed_nbytes() <= 3 * HUGE_NBYTES  # one piece, and one page before the clock is looked at


def test_what_a_slow_host_has_left_is_made_huge_when_the_store_is_done(
    aligns_mappings: None, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_buffer, "_LEAST_HUGE_S", 1000.0)
    assert _sealed_nbytes() == 12 * HUGE_NBYTES
