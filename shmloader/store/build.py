"""`build_store`: from any container to the store that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from shmloader.shared_memory.sealed_buffer import BufferBuilder
from shmloader.store.base import SharedObject, Written, finish
from shmloader.store.foreign import is_arrow, is_pandas
from shmloader.store.kept import Kept
from shmloader.store.mapping import pickled_missing, write_items
from shmloader.store.one_buffer import new_builder
from shmloader.store.progress import BuildProgress
from shmloader.store.room import check_items, check_rows, check_sample
from shmloader.store.rows import RowStore, RowWriter
from shmloader.store.size import estimate_nbytes
from shmloader.store.whole import SharedArray, SharedTensor, write_array, write_tensor

__all__ = ["build_store", "can_build", "estimate_nbytes", "write_store"]

_NO_CONTAINERS = (str, bytes, bytearray, memoryview, range)
_CONTAINERS = (SharedObject, Sequence, Mapping, Iterator, np.ndarray, torch.Tensor)
_PANDAS_SAMPLED = 256
_PANDAS_ROWS = 1 << 14


def can_build(data: Any) -> bool:
    """Whether `build_store` takes ``data``: whether it is a container of rows or items."""
    if isinstance(data, _NO_CONTAINERS) or (isinstance(data, tuple) and hasattr(data, "_fields")):
        return False
    return isinstance(data, _CONTAINERS) or is_arrow(data) or is_pandas(data)


def build_store(data: Any, *, progress: bool | None = None) -> SharedObject:
    """Put a container into shared memory.

    Runs in the process that has the data; the store then goes to others by handle.

    Args:
        data: A sequence, an iterator (consumed, never held as a whole), a mapping, an ndarray, a dense CPU
            tensor, Arrow data, or a pandas Series or DataFrame (the rows of which are read as dicts).
        progress: Whether to show a progress bar; None: if the build takes long and stderr is a terminal.

    Returns:
        The store. ``data`` itself if it is one already.

    Raises:
        TypeError: If ``data`` is no container.
        SharedMemoryExhausted: If the host has not that much memory.
        Exception: What pickling raises, for rows of types that are kept pickled.
    """
    if isinstance(data, SharedObject):
        return data
    if isinstance(data, SharedArray | SharedTensor):
        store = data.store
        if store is not None:
            return store
    if not can_build(data):
        raise TypeError(
            f"{type(data).__name__} is no container of rows: a sequence, an iterator, a mapping, an array, a "
            "tensor or a table"
        )
    with new_builder() as out:
        built: SharedObject = finish(out, write_store(data, out, progress))
        return built


def write_store(
    data: Any, out: BufferBuilder, progress: bool | None = None, kept: Kept | None = None
) -> Written:
    """Write what a container's store consists of; see `build_store`, which also says what is raised.

    Args:
        data: The container; not one that is shared already.
        out: Where to.
        progress: As for `build_store`.
        kept: What other stores in the same memory have written, and may be referred to.

    Returns:
        What `shmloader.store.base.finish` makes the store of.
    """
    if isinstance(data, torch.Tensor):
        return write_tensor(data, out, kept)
    if isinstance(data, np.ndarray) and (not data.ndim or _has_plain_items(data)):
        return write_array(np.asarray(data), out, kept)
    if is_arrow(data):
        from shmloader.store.tables import write_arrow

        return write_arrow(data, out)
    if is_pandas(data):
        step = max(1, len(data) // _PANDAS_SAMPLED)
        check_sample(list(_pandas_rows(data.iloc[::step])), len(data), "rows", ())
        return _write_rows(_pandas_rows(data), len(data), out, progress)
    if isinstance(data, Mapping):
        return _write_mapping(data, out, progress, kept)
    rows = len(data) if isinstance(data, Sequence | np.ndarray) else None
    return _write_rows(data, rows, out, progress, kept)


def _has_plain_items(data: np.ndarray[Any, Any]) -> bool:
    return not data.dtype.hasobject and not isinstance(data, np.ma.MaskedArray)


def _pandas_rows(data: Any) -> Iterator[Any]:
    parts = (data.iloc[begin : begin + _PANDAS_ROWS] for begin in range(0, len(data), _PANDAS_ROWS))
    if data.ndim == 1:
        return chain.from_iterable(part.tolist() for part in parts)
    return chain.from_iterable(part.to_dict("records") for part in parts)


def _write_rows(
    data: Any, rows: int | None, out: BufferBuilder, progress: bool | None, kept: Kept | None = None
) -> Written:
    bar = BuildProgress(progress, rows)
    try:
        if isinstance(data, list | tuple):
            check_rows(data, kept)
            writer = RowWriter(out, estimate_nbytes(data) / max(1, len(data)), len(data), kept=kept)
            chunks = _slices(data, writer)
        else:
            if isinstance(data, Sequence | np.ndarray):
                check_rows(data)
            writer = RowWriter(out)
            chunks = _pieces(data, writer)
        for chunk in chunks:
            writer.append(chunk)
            del chunk  # before the next one is made
            bar.show(writer.rows)
        return RowStore, writer.finish()
    finally:
        bar.close()


def _write_mapping(
    data: Mapping[Any, Any], out: BufferBuilder, progress: bool | None, kept: Kept | None
) -> Written:
    missing = pickled_missing(data)
    bar = BuildProgress(progress, len(data))
    try:
        if isinstance(data, dict):
            check_items(data, kept)
        writer = RowWriter(out, streamed=not isinstance(data, dict), kept=kept)
        return write_items(_shown(_pieces(data.items(), writer), writer, bar), writer, out, missing)
    finally:
        bar.close()


def _shown(chunks: Iterator[list[Any]], writer: RowWriter, bar: BuildProgress) -> Iterator[list[Any]]:
    """The chunks, with the rows so far shown after each."""
    for chunk in chunks:
        yield chunk
        del chunk
        bar.show(writer.rows)


def _slices(data: Sequence[Any], writer: RowWriter) -> Iterator[list[Any]]:
    """The chunks of a list or tuple."""
    begin = 0
    while begin < len(data):
        end = begin + writer.chunk_rows()
        yield list(data[begin:end])
        begin = end


def _pieces(data: Iterable[Any], writer: RowWriter) -> Iterator[list[Any]]:
    """The chunks of a stream. Nothing here refers to a chunk while the next one is made."""
    stream = iter(data)
    while chunk := list(islice(stream, writer.chunk_rows())):
        yield chunk
        del chunk
