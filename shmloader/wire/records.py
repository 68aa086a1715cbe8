"""Records that the main process and its workers send each other: one frozen class for each kind.

Each worker has one private channel each way. Every record of one direction has the same size, at most
``PIPE_BUF`` bytes (512 at the least, by POSIX), so the kernel writes it whole or not at all: a reader never
sees half a record, even if the writer is killed. The right to write a slot passes with the record that names
it, and the channel is the memory fence between the two processes.

Requests go to a worker: `MakeBatch`, `SendNextPart`, `BeginEpoch`. Answers come back: `Published`,
`PartReady`, `StreamEnded`, `EpochBegun`. Both name a task by ``seq``, its number over the iterator's life.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

SPIN_NS = 50_000
"""Nanoseconds for which either side looks again for a record before it sleeps, while records come quickly.
To sleep and to be woken costs more than a small batch does (docs/decisions/0008)."""

REQUEST_NBYTES = 256
"""Size of a request."""
ANSWER_NBYTES = 64
"""Size of an answer."""

_MAKE_BATCH_FIELDS = "<B3xIQQIxxxxQQQI"
INLINE_NBYTES = REQUEST_NBYTES - struct.calcsize(_MAKE_BATCH_FIELDS)
"""Most bytes of a payload that travel in the request itself; a longer payload lies at the slot's start."""


def _request_layout(fields: str) -> struct.Struct:
    return struct.Struct(f"{fields}{REQUEST_NBYTES - struct.calcsize(fields)}s")


def _answer_layout(fields: str) -> struct.Struct:
    return struct.Struct(f"{fields}{ANSWER_NBYTES - struct.calcsize(fields)}x")


# --- requests


class MakeBatch(NamedTuple):
    """A task: make one batch in the slot that comes with it.

    Attributes:
        epoch: Number of the epoch, over the iterator's life.
        seq: The task.
        position: Number of the batch in its epoch.
        slot: The slot granted.
        slot_nbytes: Bytes reserved for the slot.
        hint_nbytes: Bytes to reserve before collating, as large batches so far have needed.
        limit_nbytes: Bytes up to which the worker may grow the slot.
        payload_nbytes: Length of the packed index batch.
        payload: The packed index batch, padded; without meaning if it is longer than ``INLINE_NBYTES``.
    """

    epoch: int
    seq: int
    position: int
    slot: int
    slot_nbytes: int
    hint_nbytes: int
    limit_nbytes: int
    payload_nbytes: int
    payload: bytes


class SendNextPart(NamedTuple):
    """Permission to write the next part of a large batch: the last one was copied out of the slot.

    Attributes:
        seq: The task.
    """

    seq: int

    def pack(self) -> bytes:
        """The record."""
        return _NEXT_PART_LAYOUT.pack(_NEXT_PART, self.seq, b"")


class BeginEpoch(NamedTuple):
    """The beginning of an epoch, to which all later tasks belong. The worker answers with `EpochBegun`.

    Attributes:
        epoch: Number of the epoch, over the iterator's life.
        slot: The slot that a long payload lies in.
        slot_nbytes: Bytes reserved for that slot.
        payload_nbytes: Length of the pickled `EpochSettings`.
        payload: The pickled `EpochSettings`, as for `MakeBatch`.
    """

    epoch: int
    slot: int
    slot_nbytes: int
    payload_nbytes: int
    payload: bytes

    def pack(self) -> bytes:
        """The record."""
        return _BEGIN_EPOCH_LAYOUT.pack(_BEGIN_EPOCH, *self)


Request = MakeBatch | SendNextPart | BeginEpoch

_new = tuple.__new__  # as `_make` does it, in a third of the time

_MAKE_BATCH, _NEXT_PART, _BEGIN_EPOCH = 1, 2, 3
_MAKE_BATCH_LAYOUT = _request_layout(_MAKE_BATCH_FIELDS)
pack_make_batch = functools.partial(_MAKE_BATCH_LAYOUT.pack, _MAKE_BATCH)
"""Packs the fields of a `MakeBatch`: there is one for every batch, and no need for the object here."""
# The same without the kind, for every batch:
_unpack_make_batch = _request_layout(_MAKE_BATCH_FIELDS.replace("B3x", "4x")).unpack
_NEXT_PART_LAYOUT = _request_layout("<B7xQ")
# The payload begins where that of `MakeBatch` does, so that both may be as long.
_BEGIN_EPOCH_LAYOUT = _request_layout("<B3xIQQ20xI")


def unpack_request(record: bytes) -> Request:
    """Read a request."""
    kind = record[0]
    if kind == _MAKE_BATCH:
        return _new(MakeBatch, _unpack_make_batch(record))
    if kind == _NEXT_PART:
        return SendNextPart(_NEXT_PART_LAYOUT.unpack(record)[1])
    return BeginEpoch._make(_BEGIN_EPOCH_LAYOUT.unpack(record)[1:])


# --- answers

FAILED, DETACHED, SPILLED, REPORTED = 1, 2, 4, 8
"""Flags of a `Published`. `FAILED`: it is an exception. `DETACHED`: the worker still held views of the slot,
which were moved to private memory. `SPILLED`: the batch did not fit in the slot and was sent in parts, with
the header in them. `REPORTED`: it is a `bad_samples.Reported`."""


class Published(NamedTuple):
    """The end of a task: a batch, or an exception in its place, is complete in the slot.

    Attributes:
        seq: The task.
        slot_nbytes: Bytes reserved for the slot now.
        header_begin: Bytes from the slot's start to the header.
        header_end: Bytes from the slot's start to the end of the header, and so of the batch.
        wait_ns: Nanoseconds that the worker waited for this task, that is, for a slot.
        flags: Sum of `FAILED`, `DETACHED`, `SPILLED` and `REPORTED`; 0 for most batches.
    """

    seq: int
    slot_nbytes: int
    header_begin: int
    header_end: int
    wait_ns: int
    flags: int = 0


class PartReady(NamedTuple):
    """A part of a batch that is larger than its slot, at the slot's start.

    Attributes:
        seq: The task.
        slot_nbytes: Bytes reserved for the slot now.
        total_nbytes: Bytes of the whole batch.
        part_nbytes: Bytes of this part.
    """

    seq: int
    slot_nbytes: int
    total_nbytes: int
    part_nbytes: int

    def pack(self) -> bytes:
        """The record."""
        return _PART_LAYOUT.pack(_PART, *self)


class StreamEnded(NamedTuple):
    """The end of a task without a batch: the worker's iterable-style dataset is exhausted.

    Attributes:
        seq: The task.
        slot_nbytes: Bytes reserved for the slot now.
    """

    seq: int
    slot_nbytes: int

    def pack(self) -> bytes:
        """The record."""
        return _STREAM_ENDED_LAYOUT.pack(_STREAM_ENDED, *self)


class EpochBegun(NamedTuple):
    """The worker has come to an epoch.

    Attributes:
        epoch: As in `BeginEpoch`.
    """

    epoch: int

    def pack(self) -> bytes:
        """The record."""
        return _EPOCH_BEGUN_LAYOUT.pack(_EPOCH_BEGUN, *self)


Answer = Published | PartReady | StreamEnded | EpochBegun

_PUBLISHED, _PART, _STREAM_ENDED, _EPOCH_BEGUN = 1, 2, 3, 4
_PUBLISHED_LAYOUT = _answer_layout("<B7xQQQQQB")
pack_published = functools.partial(_PUBLISHED_LAYOUT.pack, _PUBLISHED)
"""Packs the fields of a `Published`; see `pack_make_batch`."""
_PART_LAYOUT = _answer_layout("<B7xQQQQ")
_STREAM_ENDED_LAYOUT = _answer_layout("<B7xQQ")
_EPOCH_BEGUN_LAYOUT = _answer_layout("<B3xI")
_unpack_published = _answer_layout("<8xQQQQQB").unpack_from  # for every batch
_ANSWERS: dict[int, tuple[Any, struct.Struct]] = {
    _PART: (PartReady, _PART_LAYOUT),
    _STREAM_ENDED: (StreamEnded, _STREAM_ENDED_LAYOUT),
    _EPOCH_BEGUN: (EpochBegun, _EPOCH_BEGUN_LAYOUT),
}


def unpack_answer(records: bytes, begin: int) -> Answer:
    """Read the answer at an offset."""
    if records[begin] == _PUBLISHED:
        return _new(Published, _unpack_published(records, begin))
    kind, layout = _ANSWERS[records[begin]]
    answer: Answer = kind._make(layout.unpack_from(records, begin)[1:])
    return answer
