"""Checksums of a file that `save` wrote, which lie in the file itself, where no reader of its format looks.

Arrow and Parquet files end with a footer, its length and a magic word; what is before the footer and in no
block is skipped. There lie the CRC-32 of each block of what comes before, their count in a record, and
the record's own CRC-32, which covers the footer as well. The record's mark stands at both of its ends, so
that damage to one does not make the file look like one of another program. So any changed byte is noticed.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

_BLOCK_NBYTES = 1 << 20
_RECORD = struct.Struct("<8sQI8s")  # mark, bytes before the checksums, CRC-32 of checksums and footer, mark
_MARK = b"shmlCRC2"
_ALIGNMENT = 64  # of the footer, which stays what it was

FILE_MAGIC, PARQUET_MAGIC = b"ARROW1", b"PAR1"
"""The first and the last bytes of files: of Arrow IPC's file format, and of Parquet."""


def add_checksums(file: BinaryIO) -> None:
    """Write the checksums into a complete file, open for reading and writing."""
    end = _begin_of_footer(file)
    checksums = _checksums_of(file, end)
    checksums = checksums.ljust(len(checksums) + -(len(checksums) + _RECORD.size) % _ALIGNMENT, b"\0")
    footer = file.read()
    file.seek(end)
    file.write(checksums + _RECORD.pack(_MARK, end, crc32(footer, crc32(checksums)), _MARK) + footer)


def check(path: str) -> bool:
    """Read a whole file and compare it with its checksums, or raise ValueError; False if it has none."""
    with Path(path).open("rb") as file:
        end = _begin_of_footer(file) - _RECORD.size
        if end < 0:
            return False
        file.seek(end)
        first, nbytes, checksum, last = _RECORD.unpack(file.read(_RECORD.size))
        if _MARK not in (first, last):
            return False
        footer = file.read()
        file.seek(min(nbytes, end))
        written = file.read(max(0, end - nbytes))
        # A record that is not damage but made up may count more bytes than there are: they would never end.
        if first != last or nbytes > end or crc32(footer, crc32(written)) != checksum:
            raise ValueError("its footer or its checksums are not those that were written")
        found = _checksums_of(file, nbytes)
        for block in range(0, len(found), 4):
            if found[block : block + 4] != written[block : block + 4]:
                begin = block // 4 * _BLOCK_NBYTES
                after = min(begin + _BLOCK_NBYTES, nbytes)
                raise ValueError(f"bytes {begin:,} to {after:,} are not those that were written")
        return True


def _begin_of_footer(file: BinaryIO) -> int:
    """The place of the footer in a file; -1 if it has none."""
    nbytes = file.seek(0, 2)
    file.seek(max(0, nbytes - 10))
    tail = file.read()
    for magic in (FILE_MAGIC, PARQUET_MAGIC):
        if tail.endswith(magic) and nbytes >= 10:
            begin = nbytes - len(magic) - 4
            length = int.from_bytes(tail[-len(magic) - 4 : -len(magic)], "little")
            return begin - length if length <= begin else -1
    return -1


def _checksums_of(file: BinaryIO, nbytes: int) -> bytes:
    """The CRC-32 of each block of the first bytes, four bytes for each."""
    file.seek(0)
    sizes = (min(_BLOCK_NBYTES, nbytes - begin) for begin in range(0, nbytes, _BLOCK_NBYTES))
    return b"".join(crc32(file.read(size)).to_bytes(4, "little") for size in sizes)
