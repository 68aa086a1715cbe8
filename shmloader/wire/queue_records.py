"""Records of a queue: objects to the consumer, grants to the producer.

Both pipes take whole units of 64 bytes, and no record is longer than ``PIPE_BUF``: the kernel writes it whole
or not at all. An object is one record: small ones lie in it, the others in the slot that it names.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

UNIT_NBYTES = 64
"""Every record has a multiple of so many bytes. The first unit tells how many there are."""

INLINE, IN_SLOT, GRANT, CLOSED = 1, 2, 3, 4
"""Kinds of records, in their first byte. `CLOSED` goes both ways: the sender has closed its end."""

_INLINE = struct.Struct("<BxHH")
INLINE_HEAD_NBYTES = _INLINE.size
_IN_SLOT = struct.Struct("<B7xQQQQ24x")
_GRANT = struct.Struct("<B7xQqQQQ16x")

CLOSED_RECORD = bytes([CLOSED]).ljust(UNIT_NBYTES, b"\0")


def whole_units(nbytes: int) -> int:
    """Round up to whole units."""
    return -(-nbytes // UNIT_NBYTES) * UNIT_NBYTES


def pack_inline(header_begin: int, content: bytes) -> bytes:
    """A small object, as it would lie in a slot: leaves up to ``header_begin``, then the header."""
    record = _INLINE.pack(INLINE, header_begin, len(content)) + content
    return record.ljust(whole_units(len(record)), b"\0")


def unpack_inline(unit: bytes) -> tuple[int, int]:
    """``header_begin`` and length of a small object, by the first unit of its record."""
    _, header_begin, nbytes = _INLINE.unpack_from(unit)
    return header_begin, nbytes


def pack_in_slot(seq: int, slot_nbytes: int, header_begin: int, header_end: int) -> bytes:
    """An object in the slot that was granted as ``seq``; the rest as in `records.Published`."""
    return _IN_SLOT.pack(IN_SLOT, seq, slot_nbytes, header_begin, header_end)


def unpack_in_slot(unit: bytes) -> tuple[int, int, int, int]:
    """The fields of `pack_in_slot`."""
    _, seq, slot_nbytes, header_begin, header_end = _IN_SLOT.unpack(unit)
    return seq, slot_nbytes, header_begin, header_end


class Grant(NamedTuple):
    """A grant to the producer: room for one more object, which needs no slot if it is small, and a slot."""

    seq: int = 0  # number of the grant; this and all below are of the slot
    slot: int = -1  # -1 for none
    nbytes: int = 0  # reserved for the slot
    hint_nbytes: int = 0  # to reserve for memory that is made before the object's size is known
    limit_nbytes: int = 0  # up to which the producer may grow the slot


ROOM = Grant()
"""Room, without a slot."""


def pack_grant(grant: Grant) -> bytes:
    """A grant's record."""
    return _GRANT.pack(GRANT, *grant)


def unpack_grants(records: bytes) -> list[Grant | None]:
    """The grants of consecutive records, and None where the consumer has closed its end."""
    return [Grant(*fields[1:]) if fields[0] == GRANT else None for fields in _GRANT.iter_unpack(records)]
