"""Address space: no mapping is without an owner at any moment, and none outlives its last view."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import shmloader
from shmloader import SharedMemoryExhausted
from shmloader.segment import HUGE_NBYTES, PAGE_NBYTES, map_copy_on_write, map_over, mapping, take_space
from shmloader.segment.memfd import MemfdSegment
from shmloader.segment.named import NamedSegment
from shmloader.shared_buffer import SharedBuffer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts address space in /proc")

PACKAGE = str(Path(shmloader.__file__).parent)
SMALL = HUGE_NBYTES - PAGE_NBYTES  # no huge pages
LARGE = 4 * HUGE_NBYTES


class _Stop(BaseException):
    """Comes from outside, as a Ctrl-C does."""


def address_space_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_NBYTES


def is_done_before(instruction: int, action: Callable[[], object]) -> bool:
    """Raise _Stop before the package's nth instruction of an action, if it has that many."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == "__del__":
            return None  # what a __del__ raises, pytest keeps, and the object with it
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            seen += 1
            if seen == instruction:
                raise _Stop
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except _Stop:
        return False
    finally:
        sys.settrace(before)
    return True


def map_slot(segment: Any, nbytes: int) -> Callable[[], object]:
    version, reserved = segment.reserve(0, 0, 0, nbytes)
    return lambda: segment.map(0, version, reserved)


def detach(segment: Any, nbytes: int) -> Callable[[], object]:
    version, reserved = segment.reserve(0, 0, 0, nbytes)
    return lambda: segment.map(0, version, reserved).detach()


ACTIONS = [map_slot, detach]


# The file of a named slot closes itself, and says that nobody has closed it.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("backend", [MemfdSegment, NamedSegment])
def test_an_exception_at_any_moment_leaves_no_mapping(backend: Any, nbytes: int, action: Any) -> None:
    segment = backend()
    try:
        leaves_none(action(segment, nbytes), nbytes)
    finally:
        segment.close(1)


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

        segment = MemfdSegment()
        actions = {
            "array of a worker": lambda: map_copy_on_write(file.fileno(), LARGE),
            "store": map_store,
            "huge pages of a slot": lambda: segment.reserve(0, 0, 0, LARGE),
        }
        leaves_none(actions[how], LARGE)
        segment.close(1)


def leaves_none(action: Callable[[], object], nbytes: int) -> None:
    """Interrupt an action before each of its instructions."""
    action()
    gc.collect()
    before = address_space_nbytes()
    instruction = 1
    while not is_done_before(instruction, action):
        instruction += 1
    assert instruction > 30, "nothing was interrupted"
    assert address_space_nbytes() - before < nbytes, "some mapping has no owner"


def test_without_an_exception_the_last_view_unmaps() -> None:
    segment = MemfdSegment()
    version, reserved = segment.reserve(0, 0, 0, LARGE)
    before = address_space_nbytes()
    view = segment.map(0, version, reserved).view[5:9]
    assert address_space_nbytes() - before >= LARGE
    del view
    assert address_space_nbytes() - before < LARGE
    segment.close(1)


@pytest.mark.parametrize("kernel", ["this one", "before 5.7", "without mremap"])
def test_what_is_detached_is_unmapped_once_and_keeps_its_values(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another thread has mapped meanwhile where the copy was made stays."""
    if kernel == "before 5.7":
        monkeypatch.setattr(mapping, "_MREMAP_DONTUNMAP", 1 << 6)  # a flag that this kernel lacks
    elif kernel == "without mremap":
        monkeypatch.setattr(mapping, "_mremap", None)
    segment = MemfdSegment()
    version, reserved = segment.reserve(0, 0, 0, SMALL)
    extent, other = (segment.map(0, version, reserved) for _ in range(2))
    extent.view[:3] = b"abc"
    address, before = extent.address, address_space_nbytes()
    extent.detach()
    other.view[:3] = b"xyz"
    assert (extent.address, bytes(extent.view[:4])) == (address, b"abc\0")
    neighbours = [take_space(SMALL, 3) for _ in range(4)]  # they may lie where the copy was made
    for number, neighbour in enumerate(neighbours):
        neighbour[:] = bytes([number]) * SMALL
    gc.collect()
    del extent
    for number, neighbour in enumerate(neighbours):
        assert neighbour[::PAGE_NBYTES] == bytes([number]) * (SMALL // PAGE_NBYTES)
    del neighbours, neighbour
    assert address_space_nbytes() - before < SMALL // 2
    segment.close(1)


def test_address_space_is_of_huge_pages_where_a_slot_is_as_large() -> None:
    """Whatever lies before it."""
    segment = MemfdSegment()
    version, reserved = segment.reserve(0, 0, 0, LARGE)
    kept = []
    for _ in range(8):
        kept.append((take_space(PAGE_NBYTES, 0), segment.map(0, version, reserved)))
    assert {extent.address % HUGE_NBYTES for _, extent in kept} == {0}
    segment.close(1)


def test_nothing_is_mapped_beyond_the_space() -> None:
    with (
        tempfile.TemporaryFile() as file,
        pytest.raises(ValueError, match=r"8,192 bytes do not fit into .* 4,096"),
    ):
        map_over(take_space(4096, 0), 8192, 1, file.fileno(), 0)


def test_a_refusal_says_what_was_refused() -> None:
    with pytest.raises(SharedMemoryExhausted, match=r"mapping 1,152,921,504,606,846,976 bytes .*ulimit -v"):
        take_space(1 << 60, 0)
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    with pytest.raises(SharedMemoryExhausted, match="Bad file descriptor"):
        map_copy_on_write(closed, 1)
