"""The messages between the process that serves a loader and its readers: one packet each.

A reader greets with a JSON object, and gets `WELCOME` or `REFUSED`. What is of any size (batches, exceptions,
states) travels in slots; messages say where.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

PROTOCOL = 1
"""Raise it with every change of a message."""

MOST_NBYTES = 1 << 16  # of a message

# Of the server: a byte for the kind, then for `STORED` the record, for `EPOCH` descriptors, else text.
WELCOME, REFUSED, EPOCH, STORED, END, CLOSED = range(1, 7)

# Of a reader: see `Request`.
ASK, NEXT, LEAVE, STATE, LOAD = range(1, 6)

IN_OWN, COPY, RAISES, ANSWER = 1, 2, 4, 8
"""Flags of a `Stored`: it is in the server's own segment, and not in the iterator's; the reader should copy
it, and let it go at once; it is an exception; it answers a request, and is no batch."""

_STORED = struct.Struct("<BB6q")
_REQUEST = struct.Struct("<Bq")
_EPOCH = struct.Struct("<Bqq")

MOST_RELEASED = 1000
"""So many may be let go with one request."""


class Stored(NamedTuple):
    """Something in a slot for readers: a batch, an exception or an answer."""

    flags: int
    seq: int  # number over the server's life: what is let go is named by it
    number: int  # of an answer: of the request, among those of the reader that are answered
    slot: int
    nbytes: int  # of the slot
    header_begin: int
    header_end: int


class Request(NamedTuple):
    """A message of a reader."""

    # `ASK` for an epoch, with number ``value`` for ``set_epoch()``, or -1; for the `NEXT` batch, the
    # ``value``-th since it joined the epoch; `LEAVE` the epoch; for the `STATE` after ``value`` batches of
    # the epoch, or -1 between epochs; `LOAD` a state, in a memory file of ``value`` bytes.
    kind: int
    value: int
    released: tuple[int, ...] = ()  # what it has let go since the last one


def pack_stored(stored: Stored) -> bytes:
    """Pack a message `STORED`."""
    return _STORED.pack(STORED, *stored)


def unpack_stored(message: bytes) -> Stored:
    """Unpack it."""
    return Stored(*_STORED.unpack(message)[1:])


def pack_epoch(request: int, number: int) -> bytes:
    """Pack a message `EPOCH`: the answer to a request, in an epoch of which so many batches were before."""
    return _EPOCH.pack(EPOCH, request, number)


def unpack_epoch(message: bytes) -> tuple[int, int]:
    """Unpack it."""
    _, request, number = _EPOCH.unpack(message)
    return request, number


def pack_request(kind: int, value: int, released: Sequence[int]) -> bytes:
    """Pack a reader's message."""
    return _REQUEST.pack(kind, value) + struct.pack(f"<{len(released)}q", *released)


def unpack_request(message: bytes) -> Request:
    """Unpack it. Raises `ValueError` for anything else."""
    count, rest = divmod(len(message) - _REQUEST.size, 8)
    if rest or count < 0 or count > MOST_RELEASED:
        raise ValueError(f"a request of {len(message):,} bytes")
    kind, value = _REQUEST.unpack_from(message)
    if not ASK <= kind <= LOAD or value < -1:
        raise ValueError(f"a request of kind {kind}, with {value}")
    return Request(kind, value, struct.unpack_from(f"<{count}q", message, _REQUEST.size))
