"""`build_store`: from any container to the store that holds it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from shmloader.errors import SharedMemoryExhausted
from shmloader.limits import memory_headroom
from shmloader.shared_buffer import BufferBuilder
from shmloader.store.base import SharedObject, finish
from shmloader.store.encode import ValueEncoder
from shmloader.store.mapping import KeyHashes, MappingStore
from shmloader.store.progress import BuildProgress
from shmloader.store.rows import RowStore, RowWriter
from shmloader.store.size import estimate_nbytes
from shmloader.store.whole import SharedArray, SharedTensor, build_array, build_tensor

__all__ = ["build_store", "can_build", "estimate_nbytes"]

_NO_CONTAINERS = (str, bytes, bytearray, memoryview, range)
_CONTAINERS = (SharedObject, Sequence, Mapping, Iterator, np.ndarray, torch.Tensor)
_SAMPLED_ROWS = 256
_SURE_NBYTES = 64 << 20  # lists that take less as Python objects are built without looking ahead
_PANDAS_ROWS = 1 << 14


def can_build(data: Any) -> bool:
    """Whether `build_store` takes ``data``: whether it is a container of rows or items."""
    if isinstance(data, _NO_CONTAINERS) or (isinstance(data, tuple) and hasattr(data, "_fields")):
        return False
    return isinstance(data, _CONTAINERS) or _is_arrow(data) or _is_pandas(data)


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
    if isinstance(data, torch.Tensor):
        return build_tensor(data)
    if isinstance(data, np.ndarray) and not data.dtype.hasobject and not isinstance(data, np.ma.MaskedArray):
        return build_array(np.asarray(data))
    if _is_arrow(data):
        from shmloader.store.tables import build_arrow

        return build_arrow(data)
    if _is_pandas(data):
        return _build_rows(_pandas_rows(data), len(data), progress)
    if isinstance(data, Mapping):
        return _build_mapping(data, progress)
    return _build_rows(data, len(data) if isinstance(data, Sequence | np.ndarray) else None, progress)


def _is_arrow(data: Any) -> bool:
    pa = sys.modules.get("pyarrow")  # not imported: then it is not Arrow's
    return pa is not None and isinstance(data, pa.Table | pa.RecordBatch | pa.Array | pa.ChunkedArray)


def _is_pandas(data: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.Series | pandas.DataFrame)


def _pandas_rows(data: Any) -> Iterator[Any]:
    parts = (data.iloc[begin : begin + _PANDAS_ROWS] for begin in range(0, len(data), _PANDAS_ROWS))
    if data.ndim == 1:
        return chain.from_iterable(part.tolist() for part in parts)
    return chain.from_iterable(part.to_dict("records") for part in parts)


def _build_rows(data: Iterable[Any], rows: int | None, progress: bool | None) -> RowStore:
    bar = BuildProgress(progress, rows)
    try:
        with BufferBuilder() as out:
            if isinstance(data, list | tuple):
                python_nbytes = estimate_nbytes(data)
                _check_size(_sample(data), len(data), python_nbytes, "rows")
                writer = RowWriter(out, python_nbytes / max(1, len(data)), len(data))
                chunks = _slices(data, writer)
            else:
                writer = RowWriter(out)
                chunks = _pieces(data, writer)
            for chunk in chunks:
                writer.append(chunk)
                del chunk  # before the next one is made
                bar.show(writer.rows)
            store: RowStore = finish(out, RowStore, writer.finish())
            return store
    finally:
        bar.close()


def _build_mapping(data: Mapping[Any, Any], progress: bool | None) -> MappingStore:
    bar = BuildProgress(progress, len(data))
    try:
        with BufferBuilder() as out:
            if isinstance(data, dict):
                _check_size(_sample(data), len(data), estimate_nbytes(data), "items")
            writer, keys = RowWriter(out), KeyHashes()
            for chunk in _pieces(data.items(), writer):
                writer.append(chunk)
                keys.add([key for key, _ in chunk])
                del chunk
                bar.show(writer.rows)
            store: MappingStore = finish(out, MappingStore, keys.finish(writer, out))
            return store
    finally:
        bar.close()


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


def _sample(data: Sequence[Any] | dict[Any, Any]) -> Iterator[Any]:
    """Some rows of a list or tuple, or items of a dict, evenly spaced."""
    step = max(1, len(data) // _SAMPLED_ROWS)
    return islice(data.items(), 0, None, step) if isinstance(data, dict) else iter(data[::step])


def _check_size(sampled: Iterator[Any], rows: int, python_nbytes: int, unit: str) -> None:
    """Raise SharedMemoryExhausted if the store of a list or dict is certain not to fit, before it is begun.

    The size is that of a sample's store, times the number of rows. What is only nearly too large is found
    while it is built.
    """
    if rows < 4 * _SAMPLED_ROWS or python_nbytes < _SURE_NBYTES:
        return
    sample = list(sampled)
    with BufferBuilder() as out:
        ValueEncoder(out).encode(sample)
        needed_nbytes = int(out.nbytes / len(sample) * rows)
    room = memory_headroom()
    if needed_nbytes * 0.9 > room.available_nbytes:
        raise SharedMemoryExhausted(
            f"a store of these {rows:,} {unit} needs about {needed_nbytes:,} bytes of shared memory, but "
            f"only {room.available_nbytes:,} of {room.limit_nbytes:,} bytes are available in {room.source}. "
            "Share less of it, raise the limit, or keep the data in a file: shmloader.open(path) maps Arrow "
            "IPC files that may be larger than memory.",
            needed_nbytes=needed_nbytes,
            available_nbytes=room.available_nbytes,
        )
