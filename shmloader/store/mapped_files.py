"""Files as stores: mapped where they can be read in place, else unpacked into shared memory.

A store over a file is passed on by the file's path: to any process of any host that sees the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from shmloader.errors import LoaderError
from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store import saving
from shmloader.store.base import StoreDescription, attach, finish
from shmloader.store.one_buffer import new_builder
from shmloader.store.tables import ArrowLayout, ArrowRows, ArrowStore

_PARQUET, _IPC_FILE, _IPC_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_COPIED_SHARE = 0.1  # of a mapped file's bytes in private memory, from which on it counts as compressed


class Fingerprint(NamedTuple):
    """What tells that a file is still the same one."""

    nbytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: str) -> Fingerprint:
        """Look at a file."""
        status = Path(path).stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


def open_file(path: str) -> Any:
    """Open a file as a store; see `shmloader.store.files.open_store`."""
    with Path(path).open("rb") as file:
        begin = file.read(len(_IPC_FILE))
    if begin.startswith(_PARQUET):
        parquet = pq.ParquetFile(path)
        with parquet:
            return _unpack(parquet.schema_arrow, parquet.iter_batches(), is_column=False)
    if begin == _IPC_FILE or begin.startswith(_IPC_STREAM):
        return _open_arrow(path, Fingerprint.of(path))
    raise ValueError(
        f"{path} is neither Arrow IPC nor Parquet. A store is written by store.save(path); other data can be "
        "read and passed to shmloader.share"
    )


def _open_arrow(path: str, fingerprint: Fingerprint) -> Any:
    table, copied_nbytes = _read_mapped(path)
    form = (table.schema.metadata or {}).get(saving.FORM)
    if form == saving.IMAGE:
        return attach(open_image(path, fingerprint))
    is_column = form == saving.COLUMN
    if copied_nbytes > _COPIED_SHARE * table.nbytes:
        schema, batches = table.schema, table.to_batches()
        del table
        return _unpack(schema, iter(batches), is_column)
    return ArrowFile(path, fingerprint, is_column)


def _read_mapped(path: str) -> tuple[Any, int]:
    """The table in a mapped file, and how many of its bytes had to be unpacked into private memory."""
    before = pa.total_allocated_bytes()
    source = pa.memory_map(path)
    try:
        reader = pa.ipc.open_file(source) if _is_file(source) else pa.ipc.open_stream(source)
        with reader:
            table = reader.read_all()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no complete Arrow IPC file: {error}") from error
    return table, pa.total_allocated_bytes() - before


def _is_file(source: Any) -> bool:
    begin: bytes = source.read(len(_IPC_FILE))
    source.seek(0)
    return begin == _IPC_FILE


def _unpack(schema: Any, batches: Iterator[Any], is_column: bool) -> ArrowStore:
    """Put record batches into shared memory, one by one."""
    with new_builder() as out:
        offset = out.append(b"")
        with pa.ipc.new_stream(pa.PythonFile(_Appender(out), "w"), schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        layout = ArrowLayout(offset, out.nbytes - offset, is_column)
        store: ArrowStore = finish(out, (ArrowStore, layout))
        return store


class _Appender:
    """A file for Arrow to write to."""

    closed = False

    def __init__(self, out: BufferBuilder) -> None:
        self._out = out

    def write(self, data: Any) -> int:
        self._out.append(data, alignment=1)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


def _check(path: str, fingerprint: Fingerprint) -> None:
    """Make sure that a path still means the file that a store was opened from.

    Raises:
        FileNotFoundError: If there is none any more.
        LoaderError: If it is another one, or has been written to.
    """
    try:
        now = Fingerprint.of(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"a store was opened from {path}, which is not there (any more): a process that gets such a "
            "store opens the file by its path. Keep it until all workers have started, on a path that "
            "every process sees"
        ) from None
    if now != fingerprint:
        raise LoaderError(
            f"{path} has changed since a store was opened from it: then {fingerprint.nbytes:,} bytes, inode "
            f"{fingerprint.inode}, written at {fingerprint.mtime_ns} ns; now {now.nbytes:,} bytes, inode "
            f"{now.inode}, written at {now.mtime_ns} ns. Open it anew in the main process"
        )


class ArrowFile(ArrowRows):
    """The rows of a mapped Arrow IPC file.

    Attributes:
        path: The file.
    """

    def __init__(self, path: str, fingerprint: Fingerprint, is_column: bool) -> None:
        """Map the file, which must still be the one with this fingerprint."""
        _check(path, fingerprint)
        table, _ = _read_mapped(path)
        super().__init__(table.column(0) if is_column else table)
        self.path = path
        self._fingerprint = fingerprint
        self._is_column = is_column

    def describe(self) -> StoreDescription:
        """See `SharedObject.describe`; the bytes are those of the file."""
        return replace(super().describe(), nbytes=self._fingerprint.nbytes)

    def __reduce__(self) -> Any:
        return ArrowFile, (self.path, self._fingerprint, self._is_column)


class FileImage(SharedBuffer):
    """The memory of a store, in the cell of a mapped file."""

    __slots__ = ("_fingerprint", "_path")

    def __init__(self, path: str, fingerprint: Fingerprint, offset: int, nbytes: int) -> None:
        """Map a part of a file; `open_image` finds the part."""
        super().__init__(os.open(path, os.O_RDONLY | os.O_CLOEXEC), nbytes, offset)
        self._path = path
        self._fingerprint = fingerprint

    def __reduce__(self) -> Any:
        return open_image, (self._path, self._fingerprint)


def open_image(path: str, fingerprint: Fingerprint) -> FileImage:
    """Map the memory of a store; the file must still be the one with this fingerprint."""
    _check(path, fingerprint)
    with pa.memory_map(path) as source:
        whole = source.read_buffer()
        with pa.ipc.open_file(whole) as reader:
            cell = reader.read_all().column(saving.IMAGE_NAME).chunk(0).buffers()[2]
        return FileImage(path, fingerprint, cell.address - whole.address, cell.size)
