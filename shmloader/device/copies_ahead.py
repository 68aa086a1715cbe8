"""Batches on a CUDA device, copied ahead of the program out of their slots.

Order, for a batch that is copied ahead. *Consumer* is the stream that the program works on when it calls
``next()``, *side* the stream of the copies::

    next() of an earlier batch        memory is allocated for the consumer's stream
                                      side waits for what is queued on it: the memory may have been in use
                                      side copies; an event is recorded behind that
    next() of this batch              the consumer's stream waits for the event
    a later next()                    the event is done: the slot's lease ends

The memory belongs to the consumer's stream throughout, so the caching allocator reuses it like any other, and
there is no second pool of device memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shmloader.codec import structure_of
from shmloader.codec.layout import ALIGNMENT, DTYPES, TENSOR, Leaf, table_of, unpack_table
from shmloader.codec.leaves import row_major
from shmloader.device.driver import DriverError
from shmloader.device.guard import DeviceGuard
from shmloader.device.pinned import is_pinned
from shmloader.slots import Place

LARGE_NBYTES = 256 << 10
"""A leaf of so many bytes is copied by itself, to memory of its own; smaller ones that lie close together
with one copy. ``benchmarks.device --part leaves`` compares."""

MOST_RUN_NBYTES = 8 << 20
"""The most bytes of small leaves in one copy. They share device memory: keeping one keeps all."""

_MOST_GAP_NBYTES = 4096
_MOST_KNOWN = 64
_MOST_KNOWN_NBYTES = 1 << 15  # longer headers and tables hold data or many shapes, and do not repeat

ByteArray = npt.NDArray[np.uint8]


class Run(NamedTuple):
    """Leaves that one copy takes to the device."""

    begin: int  # bytes from the slot's start to the first
    nbytes: int
    # Of the tensor that is allocated for them: the leaf itself, if it is alone; else bytes.
    shape: tuple[int, ...]
    dtype: torch.dtype
    # Their places among all leaves, with dtype, shape, strides, and offset in items.
    places: list[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]]

    def unpack(self, memory: torch.Tensor, leaves: list[Any]) -> None:
        """Put several leaves in their places; each is a tensor by itself, and not a view, for autograd."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        for place, dtype, shape, strides, offset in self.places:
            whole = typed.get(dtype)
            if whole is None:
                whole = typed[dtype] = memory.view(dtype)
            leaves[place] = whole.as_strided(shape, strides, offset).data


class Plan(NamedTuple):
    """The way of the leaves of batches with the same leaf table."""

    leaves: int
    runs: list[Run]
    kept: list[tuple[int, Leaf]]  # places of arrays and bytes, which stay where they are

    def unpack(self, memories: list[torch.Tensor], anchor: ByteArray | None) -> list[Any]:
        """The leaves: in memory of the device, and those that are kept over the anchor."""
        leaves: list[Any] = [None] * self.leaves
        for run, memory in zip(self.runs, memories, strict=True):
            if len(run.places) == 1:
                leaves[run.places[0][0]] = memory
            else:
                run.unpack(memory, leaves)
        for place, leaf in self.kept:
            leaves[place] = np.ndarray(leaf.shape, DTYPES[leaf.code].carrier, anchor, leaf.offset)
        return leaves


@functools.lru_cache(_MOST_KNOWN)
def plan_of(table: bytes) -> Plan:
    """The plan for copying the leaves of a table."""
    leaves = unpack_table(table)
    kept = [(place, leaf) for place, leaf in enumerate(leaves) if leaf.kind != TENSOR]
    groups: list[list[int]] = []
    begin = end = 0
    for place in sorted(range(len(leaves)), key=lambda place: leaves[place].offset):
        leaf = leaves[place]
        if leaf.kind != TENSOR:
            continue
        stop = leaf.offset + _nbytes(leaf)
        joins = (
            groups
            and max(_nbytes(leaf), end - begin if len(groups[-1]) == 1 else 0) < LARGE_NBYTES
            and leaf.offset - end <= _MOST_GAP_NBYTES
            and stop - begin <= MOST_RUN_NBYTES
        )
        if joins:
            groups[-1].append(place)
            end = max(end, stop)
        else:
            groups.append([place])
            begin, end = leaf.offset, stop
    return Plan(len(leaves), [_run(group, leaves) for group in groups], kept)


def _run(group: list[int], leaves: list[Leaf]) -> Run:
    first = leaves[group[0]].offset
    end = max(leaves[place].offset + _nbytes(leaves[place]) for place in group)
    alone = len(group) == 1
    begin = first if alone else first // ALIGNMENT * ALIGNMENT  # so leaves are aligned as in the slot
    nbytes = end - begin
    places = []
    for place in group:
        leaf = leaves[place]
        dtype, offset = DTYPES[leaf.code].torch_dtype, leaf.offset - begin
        places.append((place, dtype, leaf.shape, row_major(leaf.shape), offset // dtype.itemsize))
    if alone:
        return Run(begin, nbytes, places[0][2], places[0][1], places)
    return Run(begin, nbytes, (-(-nbytes // ALIGNMENT) * ALIGNMENT,), torch.uint8, places)


def _nbytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * DTYPES[leaf.code].carrier.itemsize


def _known(function: Any, key: bytes) -> Any:
    return function(key) if len(key) <= _MOST_KNOWN_NBYTES else function.__wrapped__(key)


@functools.lru_cache(_MOST_KNOWN)
def way_of(header: bytes) -> tuple[Callable[[list[Any]], Any], Plan] | None:
    """The function that joins the leaves of batches with a header, and their plan; None for other objects."""
    table = table_of(header)
    join = structure_of(header[: -4 - len(table)])
    return None if join is None else (join, _known(plan_of, table))


class DeviceBatches:
    """Copies batches of one iterator, whose table has the ``guard``, to the device of a number.

    `begin`, and what it returns, are called inside of `CudaDriver.on`.
    """

    def __init__(self, guard: DeviceGuard, device: int) -> None:
        self.guard, self.driver, self.device = guard, guard.driver, device
        self._side = 0  # the stream of copies, once there is one

    def begin(self, place: Place, anchor: ByteArray, header: bytes) -> Callable[[], Any] | None:
        """Queue the copies of a batch out of its leased slot.

        Returns a function that returns the batch, for work on the stream that is current at its call. None
        for a batch with tensors that require grad or objects of other classes than built-in containers, which
        move themselves; also for a batch in memory that is not page-locked, since the driver may wait for the
        stream before it copies that.
        """
        lease, extent = place.lease, place.extent
        if lease is None or lease() is not anchor or extent is None or not is_pinned(extent):
            return None  # if it was spilled, the slot may be another batch's by now
        way = _known(way_of, header)
        if way is None:
            return None
        join, plan = way
        driver, device = self.driver, self.device
        side = self._side = self._side or self.guard.create_stream(device)
        stream = driver.current_stream(device)
        memories = list[torch.Tensor]()
        for run in plan.runs:
            memories.append(driver.allocate(run.shape, run.dtype, device))
        allocated = driver.record(stream, device)
        driver.wait(side, allocated)
        driver.recycle(allocated)
        address = extent.address
        # The memory too: if the batch is never returned, it must not be used again before the copy is done.
        held = self.guard.hold((anchor, memories))
        try:
            for run, memory in zip(plan.runs, memories, strict=True):
                if run.nbytes:
                    driver.copy(memory.data_ptr(), address + run.begin, run.nbytes, side)
        except BaseException:
            with contextlib.suppress(DriverError):  # the first error counts
                self.guard.record_end(held, side, device)
            raise
        self.guard.record_end(held, side, device)
        if not plan.kept:
            self.guard.let_go(place)
        kept = anchor if plan.kept else None

        def finish() -> Any:
            now_on = driver.current_stream(device)
            if held.event is not None:
                driver.wait(now_on, held.event)
            for memory in memories if now_on != stream else ():
                driver.use_on_current_stream(memory)
            leaves = plan.unpack(memories, kept)
            memories.clear()  # from here on the consumer's stream is behind the copy
            return join(leaves)

        return finish
