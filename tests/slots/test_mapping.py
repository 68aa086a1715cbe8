"""Address space: every mapping has an owner at any moment, and none outlives its last view."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from interrupted_lines import alone
from robustness.processes import python

import shmloader
from shmloader import SharedMemoryExhausted
from shmloader.memory import PAGE_NBYTES, Segment, mapping
from shmloader.memory.huge_pages import HUGE_NBYTES
from shmloader.memory.mapping import address_of, map_aligned, map_copy_on_write, take_space
from shmloader.store.sealed_buffer import SharedBuffer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts address space in /proc")

PACKAGE = str(Path(shmloader.__file__).parent)
SMALL = HUGE_NBYTES - PAGE_NBYTES  # no huge pages
LARGE = 4 * HUGE_NBYTES


class _Stop(BaseException):
    """Comes from outside, as a Ctrl-C does."""


def address_space_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_NBYTES


def is_done_before(instruction: int, action: Callable[[], object]) -> bool:
    """Raise _Stop before the nth instruction of the package in an action, if there are so many."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == "__del__":
            return None  # pytest keeps errors of a __del__, and the object with them
        # From Python 3.13 on, opcodes are traced only if the tracer is set before they are requested.
        frame.f_trace = trace
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            seen += 1
            if seen == instruction:
                raise _Stop
        return trace

    before, here = sys.gettrace(), sys._getframe()
    # From Python 3.12 on, opcodes are traced only if some frame requests it before and after.
    here.f_trace_opcodes = True
    sys.settrace(trace)
    here.f_trace_opcodes = True
    try:
        alone(action)
    except _Stop:
        return False
    finally:
        sys.settrace(before)
    return True


def map_slot(segment: Any, nbytes: int) -> Callable[[], object]:
    reserved = segment.reserve(0, 0, nbytes)
    return lambda: segment.map(0, reserved)


def detach(segment: Any, nbytes: int) -> Callable[[], object]:
    reserved = segment.reserve(0, 0, nbytes)
    return lambda: segment.map(0, reserved).detach()


ACTIONS = [map_slot, detach]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_an_exception_at_any_moment_leaves_no_mapping(nbytes: int, action: Any) -> None:
    segment = Segment()
    try:
        leaves_none(action(segment, nbytes), nbytes)
    finally:
        segment.close()


@pytest.mark.parametrize("how", ["array of a worker", "store", "huge pages of a slot"])
def test_nor_does_one_while_other_memory_is_mapped(how: str) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(LARGE)

        def map_store() -> None:
            fd = os.dup(file.fileno())
            try:
                SharedBuffer(fd, LARGE)
            except _Stop:
                with contextlib.suppress(OSError):  # it may have been the buffer's already
                    os.close(fd)
                raise

        segment = Segment()
        actions = {
            "array of a worker": lambda: map_copy_on_write(file.fileno(), LARGE),
            "store": map_store,
            "huge pages of a slot": lambda: segment.reserve(0, 0, LARGE),
        }
        leaves_none(actions[how], LARGE)
        segment.close()


def leaves_none(action: Callable[[], object], nbytes: int) -> None:
    """Interrupt an action before each of its instructions.

    It runs in a thread of its own: if an exception comes between two instructions that end an ``except``
    clause, CPython keeps the handled exception as the context of all later ones.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_leaves_none, action, nbytes).result()
    assert sys.exception() is None


def _leaves_none(action: Callable[[], object], nbytes: int) -> None:
    action()
    gc.collect()
    before = address_space_nbytes()
    instruction = 1
    while not is_done_before(instruction, action):
        instruction += 1
    assert instruction > 30, "nothing was interrupted"
    assert address_space_nbytes() - before < nbytes, "some mapping has no owner"


def test_without_an_exception_the_last_view_unmaps() -> None:
    segment = Segment()
    reserved = segment.reserve(0, 0, LARGE)
    before = address_space_nbytes()
    view = segment.map(0, reserved).view[5:9]
    assert address_space_nbytes() - before >= LARGE
    del view
    assert address_space_nbytes() - before < LARGE
    segment.close()


def mapped(begin: int, nbytes: int) -> bool:
    """Whether all of a range is mapped in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(place, 16) for place in line.split()[0].split("-"))
        if first <= begin < last:
            nbytes -= last - begin
            begin = last
    return nbytes <= 0


def detached(segment: Segment) -> tuple[Any, Any, int]:
    """A slot that keeps its values though its other mapping is written; that; the address space before."""
    nbytes = segment.reserve(0, 0, LARGE)
    extent, other = (segment.map(0, nbytes) for _ in range(2))
    extent.view[:3] = b"abc"
    address, before = extent.address, address_space_nbytes()
    extent.detach()
    other.view[:3] = b"xyz"
    assert (extent.address, bytes(extent.view[:4])) == (address, b"abc\0")
    return extent, other, before


def test_what_is_detached_is_unmapped_once_and_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that another thread makes meanwhile at the address of the copy stays."""
    neighbours: list[Any] = []
    move = mapping.libc.mremap

    def move_and_map(*arguments: Any) -> Any:
        moved = move(*arguments)
        if moved != -1 % (1 << 64):
            neighbours.extend(take_space(nbytes, 3) for _ in range(4))
        return moved

    monkeypatch.setattr(mapping.libc, "mremap", move_and_map)
    segment, nbytes = Segment(), LARGE
    extent, other, before = detached(segment)
    assert len(neighbours) == 4
    gc.collect()
    del extent
    assert all(mapped(address_of(neighbour), nbytes) for neighbour in neighbours)
    neighbours.clear()
    assert address_space_nbytes() - before < -nbytes // 2, "the mapping is gone, and no copy is left"
    del other
    segment.close()


@pytest.mark.parametrize("spare", [0.5, 1.5, 2.5])
def test_a_limit_on_memory_takes_no_view_away(spare: float) -> None:
    """Moving a copy over the slot may need as much memory again for a moment, which the limit may forbid."""
    code = f"""
        import resource
        from pathlib import Path
        from shmloader import SharedMemoryExhausted
        from shmloader.memory import Segment

        nbytes = 64 << 20
        segment = Segment()
        extent = segment.map(0, segment.reserve(0, 0, nbytes))
        extent.view[:3] = b"abc"
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        used = int(status["VmData"].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + int({spare} * nbytes), resource.RLIM_INFINITY))
        try:
            extent.detach()
        except SharedMemoryExhausted:
            print("refused")
        print(bytes(extent.view[:3]).decode())
        """
    assert python(code).split() == (["refused"] if spare < 2 else []) + ["abc"]


@pytest.mark.parametrize("kernel", ["as it is", "before Linux 5.7"])
def test_a_copy_that_cannot_be_moved_is_not_kept(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot stays mapped as it was."""
    refused = {"as it is": errno.ENOMEM, "before Linux 5.7": errno.EINVAL}[kernel]

    def fails(*_: object) -> Any:
        ctypes.set_errno(refused)
        return mapping._MAP_FAILED

    monkeypatch.setattr(mapping.libc, "mremap", fails)
    segment = Segment()
    nbytes = segment.reserve(0, 0, LARGE)
    extent = segment.map(0, nbytes)
    extent.view[:3] = b"abc"
    before = address_space_nbytes()
    for _ in range(3):
        with pytest.raises(SharedMemoryExhausted, match="moving a mapping of 8,388,608 bytes failed"):
            extent.detach()
    assert address_space_nbytes() - before < nbytes
    assert bytes(extent.view[:3]) == b"abc"
    segment.close()


def test_before_linux_5_7_a_copy_has_no_owner_until_it_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_MREMAP_DONTUNMAP", 1 << 6)  # to which this kernel says EINVAL
    segment, nbytes = Segment(), LARGE
    extent, other, before = detached(segment)
    assert abs(address_space_nbytes() - before) < nbytes // 2
    del extent
    assert address_space_nbytes() - before < -nbytes // 2
    del other
    segment.close()


@pytest.mark.parametrize("nbytes", [PAGE_NBYTES, HUGE_NBYTES + PAGE_NBYTES, LARGE])
def test_an_alignment_that_the_system_does_not_give_is_had_from_more_space(nbytes: int) -> None:
    """Huge pages need that before Linux 6.7."""
    alignment = 16 * HUGE_NBYTES
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes)
        before = address_space_nbytes()
        kept = [map_aligned(alignment, nbytes, 1, file.fileno(), 0) for _ in range(3)]
        assert {address % alignment for _, address in kept} == {0}
        assert len({address for _, address in kept}) == 3
        assert all(mapped(address, nbytes) for _, address in kept)
        ctypes.memset(kept[0][1] + nbytes - 3, 7, 3)
        file.seek(nbytes - 4)
        assert file.read() == b"\0\7\7\7"
        kept.clear()
        assert address_space_nbytes() - before < alignment


def test_a_store_is_read_where_its_address_space_begins_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens before Linux 6.7, where an alignment takes more space than the store."""
    alignment = 2 * HUGE_NBYTES
    monkeypatch.setattr(mapping, "HUGE_NBYTES", alignment)
    texts = [str(number) * (alignment // 8) for number in range(9)]
    kept: list[Any] = []
    for number in range(30):
        kept += take_space((1 + number % 3) * HUGE_NBYTES, 0), (store := shmloader.share(texts))
        assert store.buffer.address % alignment == 0
        assert list(store) == texts
        if address_of(store.buffer.mapping) < store.buffer.address:
            return
    raise AssertionError("all began where their address space does")


def test_address_space_is_of_huge_pages_where_a_slot_is_as_large() -> None:
    """The mappings before it do not matter."""
    segment = Segment()
    reserved = segment.reserve(0, 0, LARGE)
    kept = []
    for _ in range(8):
        kept.append((take_space(PAGE_NBYTES, 0), segment.map(0, reserved)))
    assert {extent.address % HUGE_NBYTES for _, extent in kept} == {0}
    segment.close()


@pytest.mark.parametrize("fills", [False, True])
def test_who_fills_a_slot_meets_no_fault_for_each_page(fills: bool) -> None:
    segment = Segment()
    segment.reserve(0, 0, SMALL)
    np.frombuffer(segment.map(0, SMALL).buffer, np.uint8)[:] = 1  # another worker was here before
    pages = np.frombuffer(segment.map(0, SMALL, fills=fills).buffer, np.uint8)[::PAGE_NBYTES]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pages[:] = 2
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    segment.close()
    assert (faults < len(pages) / 10) == fills


@pytest.mark.parametrize("what", ["Segment()", "share(list(range(9000)))", "begun()"])
def test_what_is_alive_at_the_interpreters_end_ends_without_a_word(what: str) -> None:
    """If a module that goes later holds the object, names of its own module are gone by then."""
    code = f"""
        import torch
        from shmloader import DataLoader, share
        from shmloader.memory import Segment

        def begun():
            iterator = iter(DataLoader(list(range(99)), num_workers=2))
            next(iterator)
            return iterator

        torch.kept = {what}
        """
    assert python(code) == ""


def test_a_refusal_says_what_was_refused() -> None:
    with pytest.raises(SharedMemoryExhausted, match=r"mapping 1,152,921,504,606,846,976 bytes .*ulimit -v"):
        take_space(1 << 60, 0)
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    with pytest.raises(SharedMemoryExhausted, match=r"Bad file descriptor$"):
        map_copy_on_write(closed, 1)
