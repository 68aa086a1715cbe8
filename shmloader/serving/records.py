"""The messages between the process that serves a loader and its readers: one packet each.

A reader greets with a JSON object, and gets `WELCOME` or `REFUSED`. What may be large (batches, exceptions,
states) travels in slots; messages say where.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

PROTOCOL = 2
"""Raise it with every change of a message."""

MOST_STATE_NBYTES = 1 << 16  # of a state that is loaded
MOST_REQUEST_NBYTES = MOST_STATE_NBYTES + (1 << 13)
MOST_NBYTES = 1 << 13  # of a message of the server

# Of the server: a byte for the kind, then for `STORED` a record (and more such messages, joined), for `EPOCH`
# two numbers, beside descriptors, for `END` nothing, else text.
WELCOME, REFUSED, EPOCH, STORED, END, CLOSED = range(1, 7)

# Of a reader: see `Request`.
ASK, NEXT, LEAVE, STATE, LOAD = range(1, 6)

IN_OWN, COPY, RAISES, ANSWER = 1, 2, 4, 8
"""Flags of a `Stored`: it is in the server's own segment, and not in the iterator's; the reader should copy
it, and let it go at once; it is an exception; it answers a request, and is no batch."""

MOST_RELEASED = 500
"""So many may be let go with one request."""

_STORED = struct.Struct("<BB6q")
_EPOCH = struct.Struct("<Bqq")
_REQUEST = struct.Struct("<BHqq")


class Stored(NamedTuple):
    """Something in a slot for readers: a batch, an exception or an answer."""

    flags: int
    seq: int  # number over the server's life: what is let go is named by it
    number: int  # of a batch in its epoch, from 1 on; of an answer: that of the request
    slot: int
    nbytes: int  # of the slot
    header_begin: int
    header_end: int


class Request(NamedTuple):
    """A message of a reader."""

    # `ASK` for an epoch, with number ``value`` for ``set_epoch()``, or -1; for batches up to the
    # ``value``-th of the epoch, the `NEXT` one; `LEAVE` the epoch; for the `STATE` after ``value`` batches
    # of the epoch, or -1 between epochs; `LOAD` a state.
    kind: int
    value: int
    number: int = 0  # the reader's own, for the answer
    released: tuple[int, ...] = ()  # what it has let go; saying so again does nothing
    text: bytes = b""  # of a state


def pack_stored(stored: Stored) -> bytes:
    """Pack a message `STORED`."""
    return _STORED.pack(STORED, *stored)


def unpack_stored(message: bytes) -> list[Stored]:
    """Unpack one, or several that were joined."""
    return [Stored._make(fields[1:]) for fields in _STORED.iter_unpack(message)]


def pack_epoch(request: int, number: int) -> bytes:
    """Pack a message `EPOCH`: the answer to a request, in an epoch of which so many batches were before."""
    return _EPOCH.pack(EPOCH, request, number)


def unpack_epoch(message: bytes) -> tuple[int, int]:
    """Unpack it."""
    _, request, number = _EPOCH.unpack(message)
    return request, number


def pack_request(kind: int, value: int, number: int, released: Sequence[int], text: bytes = b"") -> bytes:
    """Pack a reader's message."""
    count = len(released)
    return _REQUEST.pack(kind, count, value, number) + struct.pack(f"<{count}q", *released) + text


def unpack_request(message: bytes) -> Request:
    """Unpack it. Raises `ValueError` for anything else."""
    begin, kind, count, value, number = _REQUEST.size, 0, 0, 0, 0
    if len(message) >= begin:
        kind, count, value, number = _REQUEST.unpack_from(message)
    text = begin + 8 * count
    if not ASK <= kind <= LOAD or value < -1 or len(message) < text or (kind != LOAD and len(message) > text):
        raise ValueError(f"a request of {len(message):,} bytes, kind {kind}, with {value}")
    return Request(
        kind, value, number, struct.unpack_from(f"<{count}q", message, begin) if count else (), message[text:]
    )
