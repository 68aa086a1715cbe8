"""Writing a store to a file. Imports no other module of this package: every store calls it.

The file is Arrow IPC. Where Arrow has types that give the rows back as they are (numbers, texts, bytes,
None, dicts with the same keys, lists, and Arrow data itself) any program can read it. Other stores are
written as they lie in memory, into the one cell of a table, and only `shmloader.open` reads them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUFFIXES = (".arrow", ".ipc", ".feather")
"""Names that a store is saved under; all of them mean the same format."""

FORM = b"shmloader"
"""Key of the schema's metadata that says what the table stands for."""

TABLE, COLUMN, IMAGE = b"table", b"column", b"image"
"""The rows are the table's; those of its only column; or what lies in its only cell as it is in memory."""

PADDING = b"padding"
"""Key of the schema's metadata that lets an image begin with a page."""

IMAGE_NAME = "shmloader store"
"""Name of the column whose cell is an image."""


def save(store: Any, path: str | os.PathLike[str]) -> None:
    """Write a store; see `SharedObject.save`.

    Args:
        store: The store.
        path: Where to. A file that is there is replaced, once the new one is complete.

    Raises:
        ValueError: If the suffix is none of `SUFFIXES`.
        TypeError: If ``store`` is a part of another one that neither has an Arrow type nor can be copied.
        SharedMemoryExhausted: If such a part has to be copied, and the host has not the memory.
        OSError: If the file cannot be written.
    """
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise ValueError(
            f"a store is saved as Arrow IPC, in a file named *{', *'.join(SUFFIXES)}; not as {target.name!r}"
        )
    import pyarrow as pa

    form = _arrow_form(store)
    if form is None and getattr(store, "image", None) is None:
        # A field, a slice, the items of a dict, or what refers to another store's memory.
        store = store.alone(range(len(store)))
        form = _arrow_form(store)
    if form is None:
        table = _image_of(store)
    else:
        data = store.to_arrow()
        table = data if form == TABLE else pa.table({"": data})
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), FORM: form})
    with _replacing(target) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _arrow_form(store: Any) -> bytes | None:
    """How the rows are kept in Arrow's own types; None if those would not give them back as they are."""
    store = getattr(store, "whole", store)  # of a slice, the store: types are as wide as all rows need
    kind = store.describe().kind
    if kind in ("table", "column"):
        return TABLE if kind == "table" else COLUMN
    if not hasattr(store, "column_of"):
        return None
    merged: Any = ()
    for chunk in range(len(store.starts) - 1):
        merged = _merge(merged, _signature(store.column_of(chunk)))
    if not merged:
        return None
    return TABLE if merged[0] == "dict" else COLUMN


# A signature says what rows are: a word, and for containers those of what is inside. None: not Arrow's.
# () stands for no rows and for nothing but None, which any type may have beside its values.


def _signature(column: Any) -> Any:
    kind = type(column).__name__
    if kind == "Nones":
        return ()
    if kind == "Bools":
        return ("bool",)
    if kind == "Numbers":
        return ("float",) if column.code == "d" else ("int",)
    if kind == "Strings":
        return ("str",) if column.text else ("bytes",)
    if kind == "Lists" and column.kind is list:
        items = _signature(column.items)
        return None if items is None else ("list", items)
    if kind == "Dicts" and column.names and all(map(is_utf8, column.names)):
        fields = tuple(_signature(field) for field in column.fields)
        return None if None in fields else ("dict", column.names, *fields)
    return None


def is_utf8(name: str) -> bool:
    """Whether Arrow can have a field of this name: lone surrogates have no UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _merge(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return None
    if not one or not other or one == other:
        return one or other
    if one[0] != other[0] or len(one) != len(other) or (one[0] == "dict" and one[1] != other[1]):
        return None
    words = 2 if one[0] == "dict" else 1
    inner = tuple(map(_merge, one[words:], other[words:]))
    # Chunks of different kinds inside: Arrow would convert some.
    return None if not inner or None in inner else (*one[:words], *inner)


def _image_of(store: Any) -> Any:
    """A table of one cell: the memory of a store that consists of nothing else."""
    import pyarrow as pa

    # Written with a cell of one byte, the file tells where the cell will lie: lengths have fixed sizes.
    sink = pa.BufferOutputStream()
    small = _one_cell(b"\0", b"")
    with pa.ipc.new_file(sink, small.schema) as writer:
        writer.write_table(small)
    written = sink.getvalue()
    offset = pa.ipc.open_file(written).read_all().column(0).chunk(0).buffers()[2].address - written.address
    return _one_cell(store.image, b" " * (-offset % mmap.ALLOCATIONGRANULARITY))


def _one_cell(image: Any, padding: bytes) -> Any:
    """A table of one cell; the padding, in the metadata that comes before it, lets it begin with a page."""
    import numpy as np
    import pyarrow as pa

    ends = pa.py_buffer(np.array([0, memoryview(image).nbytes], np.int64))
    cell = pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, pa.py_buffer(image)])
    return pa.table({IMAGE_NAME: cell}).replace_schema_metadata({FORM: IMAGE, PADDING: padding})


@contextmanager
def _replacing(target: Path) -> Iterator[Any]:
    """A file beside ``target`` that takes its name when it is complete.

    Processes that have the old file mapped keep it; writing into it would change what they read, and
    shortening it would end them with a bus error.
    """
    with _naming(target):
        fd, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:50]}-")
        try:
            with os.fdopen(fd, "wb") as file:
                yield file
            mask = os.umask(0)
            os.umask(mask)
            Path(name).chmod(0o666 & ~mask)  # as of a file that open() makes
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink()
            raise


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Errors of the system name the file that was asked for, not the one beside it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not the system's
            raise
        named = OSError(error.errno, error.strerror, os.fspath(target))  # of the class that goes with errno
        raise named.with_traceback(error.__traceback__) from None
