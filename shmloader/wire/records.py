"""Records between the main process and its workers: one class, and one layout, for each kind.

Each worker has one private channel each way. Every record of one direction has the same size, at most
``PIPE_BUF`` bytes, so the kernel writes it whole or not at all: a reader never sees half a record, even if
the writer is killed. The right to write a slot passes with the record that names it, and the channel is the
memory fence between the two processes.

Requests go to a worker, answers come back. Both name a task by ``seq``, its number over the iterator's life.
Senders pack them from their fields, without an object; receivers get objects.
"""

from __future__ import annotations

import functools
import select
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

SPIN_NS = 50_000
"""Nanoseconds for which either side looks again for a record before it sleeps, while records come quickly.
Going to sleep and waking up costs more than a small batch (docs/decisions/0008)."""

REQUEST_NBYTES = min(4096, getattr(select, "PIPE_BUF", 512))
"""Size of a request: with 4,096 bytes some 500 indices travel in it."""
ANSWER_NBYTES = 64
"""Size of an answer."""
INLINE_NBYTES = REQUEST_NBYTES - 56
"""Most bytes of a payload that travel in the request itself; a longer payload lies at the slot's start."""

_STATE_NBYTES = ANSWER_NBYTES - 20  # bytes of a state in a `HandedOver`

_Kinds = dict[int, tuple[Any, Callable[[bytes, int], tuple[Any, ...]]]]
_requests: _Kinds = {}
_answers: _Kinds = {}
_new = tuple.__new__  # as `_make` does it, in a third of the time


def _packs(kinds: _Kinds, kind: Any, fields: str, nbytes: int) -> Callable[..., bytes]:
    """Number a kind of record and note its layout; returns the function that packs its fields."""
    number = len(kinds) + 1
    kinds[number] = kind, struct.Struct(f"<x{fields}").unpack_from
    padding = nbytes - struct.calcsize(f"<B{fields}")
    return functools.partial(struct.Struct(f"<B{fields}{padding}x").pack, number)


def _unpack(kinds: _Kinds, records: bytes, begin: int = 0) -> Any:
    kind, unpack = kinds[records[begin]]
    return _new(kind, unpack(records, begin))


# --- requests


class MakeBatch(NamedTuple):
    """A task: make one batch in the slot that comes with it."""

    epoch: int  # number of the epoch, over the iterator's life
    seq: int
    position: int  # number of the batch in its epoch
    slot: int
    slot_nbytes: int  # bytes reserved for the slot
    hint_nbytes: int  # bytes to reserve before collating, as large batches so far have needed
    limit_nbytes: int  # bytes up to which the worker may grow the slot
    payload_nbytes: int  # length of the packed index batch
    payload: bytes  # the packed index batch, padded; without meaning if it is longer than ``INLINE_NBYTES``


class SendNextPiece(NamedTuple):
    """Permission to write the next piece of a large batch: the last one was copied out of the slot."""

    seq: int


class BeginEpoch(NamedTuple):
    """The beginning of an epoch, to which all later tasks belong."""

    epoch: int  # number of the epoch, over the iterator's life
    # Length of the pickled `EpochSettings`, which may come in several such records; 0 for a worker that was
    # started with them, which answers with `EpochBegun`.
    total_nbytes: int
    begin: int  # bytes of the settings in earlier records
    piece: bytes  # the next of them, padded


class HandOver(NamedTuple):
    """The end of a worker, after all tasks before it: it answers with `HandedOver` records."""


class TakeOver(NamedTuple):
    """A piece of what another worker has handed over; comes before the first task."""

    total_nbytes: int
    begin: int  # bytes in earlier records
    piece: bytes  # the next of them, padded


class Measure(NamedTuple):
    """Whether to measure the batches of all later tasks, and send their `BatchTimes`."""

    is_on: bool


Request = MakeBatch | SendNextPiece | BeginEpoch | HandOver | TakeOver | Measure

pack_make_batch = _packs(_requests, MakeBatch, f"IQQIQQQI{INLINE_NBYTES}s", REQUEST_NBYTES)
pack_send_next_piece = _packs(_requests, SendNextPiece, "Q", REQUEST_NBYTES)
pack_begin_epoch = _packs(_requests, BeginEpoch, f"IQQ{INLINE_NBYTES}s", REQUEST_NBYTES)
pack_hand_over = _packs(_requests, HandOver, "", REQUEST_NBYTES)
pack_take_over = _packs(_requests, TakeOver, f"QQ{INLINE_NBYTES}s", REQUEST_NBYTES)
pack_measure = _packs(_requests, Measure, "?", REQUEST_NBYTES)


unpack_request: Callable[[bytes], Request] = functools.partial(_unpack, _requests)
"""Reads a request."""

# --- answers

DETACHED, SPILLED, REPORTED, FULL = 1, 2, 4, 8
"""Flags of a `Published`. `DETACHED`: the worker still held views of the slot, which were moved to private
memory. `SPILLED`: the batch did not fit in the slot and was sent in pieces, with the header in them.
`REPORTED`: it is a `bad_samples.Report`, with the batch or an exception. `FULL`: the worker has more private
memory than it may have."""


class Published(NamedTuple):
    """The end of a task: a batch, or an exception in its place, is complete in the slot."""

    seq: int
    slot_nbytes: int  # bytes reserved for the slot now
    header_begin: int  # bytes from the slot's start to the header
    header_end: int  # bytes from the slot's start to the end of the header, and so of the batch
    wait_ns: int  # nanoseconds that the worker waited for this task, that is, for a slot
    made_ns: int  # nanoseconds that it then took to make the batch
    flags: int  # sum of `DETACHED` and others; 0 for most batches


class PieceReady(NamedTuple):
    """A piece of a batch that is larger than its slot, at the slot's start."""

    seq: int
    slot_nbytes: int  # bytes reserved for the slot now
    total_nbytes: int
    piece_nbytes: int  # bytes of this piece


class StreamEnded(NamedTuple):
    """The end of a task without a batch: the worker's iterable-style dataset is exhausted."""

    seq: int
    slot_nbytes: int  # bytes reserved for the slot now


class EpochBegun(NamedTuple):
    """A worker that was started in the middle of an epoch is ready for its tasks."""

    epoch: int  # as in `BeginEpoch`


class BatchTimes(NamedTuple):
    """The times of a batch in its worker, while a loader is profiled; the batch follows in the same write.

    Seconds have the precision of a 32-bit float.
    """

    seq: int  # the task
    began_ns: int  # when the worker had the task, by ``perf_counter_ns()``, the same clock in all processes
    wait_s: float  # seconds that it had waited for it
    fetch_s: float  # seconds that it fetched samples; with `collate_s` in it if rows were gathered
    collate_s: float  # seconds in ``collate_fn``
    write_s: float  # seconds that it encoded the batch: copies of leaves into the slot, pickling of the rest
    cpu_s: float  # seconds of processor time of the worker
    delay_s: float  # seconds in which it was ready to run and had no core
    # Seconds of the slowest `slowest_count` samples that were fetched together; 0 if unknown.
    slowest_s: float
    slowest_begin: int  # the place of the first of them in the index batch
    slowest_count: int  # their number, mostly 1
    copied_nbytes: int  # bytes of leaves that were copied into the slot
    header_nbytes: int  # bytes of the header; both are at most 4 GiB
    batches: int  # that it stands for: itself, and quicker ones before it that were not measured


class HandedOver(NamedTuple):
    """A piece of the state that the next worker goes on with; the worker ends after the last one."""

    total_nbytes: int
    private_nbytes: int  # of the worker's memory when it was looked at last
    piece_nbytes: int
    piece: bytes  # padded


Answer = Published | PieceReady | StreamEnded | EpochBegun | BatchTimes | HandedOver

pack_published = _packs(_answers, Published, "QQQQQQB", ANSWER_NBYTES)
pack_piece_ready = _packs(_answers, PieceReady, "QQQQ", ANSWER_NBYTES)
pack_stream_ended = _packs(_answers, StreamEnded, "QQ", ANSWER_NBYTES)
pack_epoch_begun = _packs(_answers, EpochBegun, "I", ANSWER_NBYTES)
pack_batch_times = _packs(_answers, BatchTimes, "QQfffffffIHIII", ANSWER_NBYTES)
pack_handed_over = _packs(_answers, HandedOver, f"QQB{_STATE_NBYTES}s", ANSWER_NBYTES)


PUBLISHED = 1
"""The first byte of a `Published`."""
unpack_published: Callable[[bytes, int], tuple[int, int, int, int, int, int, int]]
unpack_published = _answers[PUBLISHED][1]
"""Reads the fields of a `Published`, without an object: there is one for each batch."""


def handed_over(state: bytes, private_nbytes: int) -> list[bytes]:
    """The `HandedOver` records of a state, several in each write."""
    pieces = [state[begin : begin + _STATE_NBYTES] for begin in range(0, len(state), _STATE_NBYTES)]
    records = [pack_handed_over(len(state), private_nbytes, len(piece), piece) for piece in pieces]
    at_once = REQUEST_NBYTES // ANSWER_NBYTES
    return [b"".join(records[begin : begin + at_once]) for begin in range(0, len(records), at_once)]


def take_over(state: bytes) -> list[bytes]:
    """The `TakeOver` records of a state."""
    return [
        pack_take_over(len(state), begin, state[begin : begin + INLINE_NBYTES])
        for begin in range(0, len(state), INLINE_NBYTES)
    ]


unpack_answer: Callable[..., Answer] = functools.partial(_unpack, _answers)
"""Reads an answer, the first of consecutive ones or, with a place in them, the one there."""
