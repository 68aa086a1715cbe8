"""Gathering rows of a `RowStore` by columns, with one call for each chunk of a column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import torch

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.shared_memory.sealed_buffer import SharedBuffer
from shmloader.store.arrays import Array, ArrayKind, array_of_tensor, kind_of_array, kind_of_tensor
from shmloader.store.chunks import ChunkReaders, Chunks
from shmloader.store.columns.classes import is_plain_namedtuple
from shmloader.store.columns.read import Reader, block_of, make_reader
from shmloader.store.columns.types import ArrayType, NamedTupleType, OptionalType, TupleType

_ROWS_WORTH_A_CALL = 16  # NumPy's calls for a chunk cost about as much as reading so many rows
_INTS, _FLOATS = ArrayKind(np.dtype(np.int64), 0), ArrayKind(np.dtype(np.float64), 0)
_KIND_OF_SCALAR = {int: _INTS, float: _FLOATS, bool: ArrayKind(np.dtype(np.bool_), 0)}


class Prepared:
    """A column of a chunk, looked at once: what gathering asks of it each time.

    Attributes:
        column: The Arrow array.
        names: The keys of dicts that all have the same ones; else empty.
        shape: See `tuple_shape`.
        block: All values as one array and what they are; None where they cannot be one.
    """

    def __init__(self, column: Any, memory: SharedBuffer) -> None:
        self.column = column
        self.names = _keys(column)
        self.shape = tuple_shape(column.type)
        self.block = _block(column, memory)
        self._memory = memory
        self._fields: dict[int, Prepared] = {}
        self._read: Reader | None = None

    def field(self, number: int) -> Prepared:
        """One field of records."""
        found = self._fields.get(number)
        if found is None:
            column = self.column
            storage = column.storage if isinstance(column.type, pa.ExtensionType) else column
            found = self._fields[number] = Prepared(storage.field(number), self._memory)
        return found

    def reader(self, readers: ChunkReaders, chunk: int) -> Reader:
        """The function that reads a row."""
        if self._read is None:
            self._read = make_reader(self.column, readers.scope(chunk))
        return self._read


class Columns(Protocol):
    """The store whose rows are gathered."""

    chunks: Chunks
    prepared: dict[int, Prepared]

    def field(self, chunk: int) -> Any:
        """The values of a chunk, as an Arrow array."""

    def readers(self) -> ChunkReaders:
        """The functions that read the rows."""

    def __getitems__(self, indices: Any) -> list[Any]: ...


class _Part(NamedTuple):
    """What one chunk contributes: rows of its column, and where in the result they go."""

    chunk: int
    column: Prepared
    rows: Any
    positions: Any


def take(store: Columns, rows: np.ndarray[Any, Any], out: Any = None) -> Any:
    """Gather rows, numbered from 0 on; see `Store.take`."""
    starts = np.asarray(store.chunks.starts)
    chunks = np.searchsorted(starts, rows, "right") - 1
    present = np.unique(chunks)
    if not len(rows) and len(starts) > 1:
        present = np.zeros(1, np.int64)  # nothing of the first chunk: of the right type
    if not len(present):
        return [] if out is None else out
    if 0 < len(rows) < _ROWS_WORTH_A_CALL * len(present):
        return join(store.__getitems__(rows), out)
    parts = []
    for chunk in present.tolist():
        prepared = store.prepared.get(chunk)
        if prepared is None:
            prepared = store.prepared[chunk] = Prepared(store.field(chunk), store.chunks.memory(chunk))
        positions = np.flatnonzero(chunks == chunk)
        parts.append(_Part(chunk, prepared, rows[positions] - starts[chunk], positions))
    return _gather(parts, len(rows), store, out)


def _gather(parts: list[_Part], count: int, store: Columns, out: Any) -> Any:
    """Gather ``count`` rows out of chunks that hold the same data in, perhaps, different columns."""
    first = parts[0].column
    if first.names and all(part.column.names == first.names for part in parts):
        outs = outputs_by_name(out, first.names)
        return {
            name: _gather(_fields(parts, n), count, store, outs[name]) for n, name in enumerate(first.names)
        }
    length = len(first.shape[1])
    if length and out is None and all(part.column.shape == first.shape for part in parts):
        columns = [_gather(_fields(parts, n), count, store, None) for n in range(length)]
        if isinstance(first.column.type, NamedTupleType):
            return tuple.__new__(store.chunks.finder.namedtuple(*first.shape), columns)
        return tuple(columns)
    blocks = [part.column.block for part in parts if part.column.block is not None]
    kinds = {(kind, block.shape[1:]) for block, kind in blocks}
    if len(blocks) == len(parts) and len(kinds) == 1:
        return _gather_blocks(parts, [block for block, _ in blocks], blocks[0][1], count, out)
    samples: list[Any] = [None] * count
    for part in parts:
        read = part.column.reader(store.readers(), part.chunk)
        for position, row in zip(part.positions.tolist(), part.rows.tolist(), strict=True):
            samples[position] = read(row)
    return join(samples, out)


def _fields(parts: list[_Part], number: int) -> list[_Part]:
    return [_Part(chunk, column.field(number), rows, places) for chunk, column, rows, places in parts]


def _keys(column: Any) -> tuple[str, ...]:
    if not pa.types.is_struct(column.type) or column.null_count:
        return ()
    if any(isinstance(field.type, OptionalType) for field in column.type):
        return ()
    names = tuple(field.name for field in column.type)
    return names if len(set(names)) == len(names) else ()


def tuple_shape(kind: Any) -> tuple[str, tuple[str, ...]]:
    """The class and the fields of tuples that all have the same; no fields for any other type."""
    if isinstance(kind, TupleType | NamedTupleType) and pa.types.is_struct(kind.storage_type):
        return kind.parameters.get("python", ""), tuple(field.name for field in kind.storage_type)
    return "", ()


def _block(column: Any, memory: SharedBuffer) -> tuple[Array, ArrayKind] | None:
    """A column as one array and what its rows are; None where it cannot be one."""
    kind = column.type
    if isinstance(kind, ArrayType):
        return None if pa.types.is_dictionary(kind.storage_type) else block_of(column, memory)
    if column.null_count or not _is_number(kind):
        return None
    dtype = np.dtype(kind.to_pandas_dtype())
    numbers = np.frombuffer(column.buffers()[1] or b"", dtype)[column.offset : column.offset + len(column)]
    return numbers, _FLOATS if dtype.kind == "f" else _INTS


def _is_number(kind: Any) -> bool:
    """Whether values of an Arrow type are Python's int, of at most 64 bits, or float."""
    return bool(kind == pa.float64() or (pa.types.is_integer(kind) and kind != pa.uint64()))


def _gather_blocks(parts: list[_Part], blocks: list[Array], kind: ArrayKind, count: int, out: Any) -> Any:
    shape = (count, *blocks[0].shape[1:])
    target = np.empty(shape, kind.dtype) if out is None else output_array(out, shape, kind)
    for part, block in zip(parts, blocks, strict=True):
        if len(block) <= part.rows.max(initial=-1):
            raise IndexError(f"a column of {len(block):,} items ends before row {part.rows.max():,}")
    if len(parts) == 1 and blocks[0].dtype == kind.dtype:
        blocks[0].take(parts[0].rows, axis=0, out=target, mode="clip")  # "raise" would buffer; checked before
    else:
        for part, block in zip(parts, blocks, strict=True):
            target[part.positions] = block.take(part.rows, axis=0)
    return _finished(target, kind) if out is None else out


def _finished(array: Array, kind: ArrayKind) -> Any:
    return array if kind.torch_dtype is None else wrap_tensor(array, kind.torch_dtype)


def join(samples: list[Any], out: Any) -> Any:
    """Turn rows that were read one by one into columns."""
    if len(set(map(type, samples))) == 1:
        first = samples[0]
        # Of a subclass (an OrderedDict, a defaultdict) columns would not say that the rows are of it.
        if type(first) is dict and len({tuple(sample) for sample in samples}) == 1:
            outs = outputs_by_name(out, first)
            return {name: join([sample[name] for sample in samples], outs[name]) for name in first}
        plain = out is None and (type(first) is tuple or is_plain_namedtuple(type(first)))
        if plain and len(set(map(len, samples))) == 1:
            columns = [join(list(column), None) for column in zip(*samples, strict=True)]
            return tuple.__new__(type(first), columns)
        array, kind = _stack(samples, first)
        if array is not None:
            if out is None:
                return _finished(array, kind)
            output_array(out, array.shape, kind)[...] = array
            return out
    if out is not None:
        raise TypeError(f"rows such as {samples[:1]!r:.200} cannot be gathered into an output")
    return samples


def _stack(samples: list[Any], first: Any) -> tuple[Array | None, ArrayKind]:
    """Samples of one type as one array and what its rows are; None where they are not to be joined."""
    kind = _KIND_OF_SCALAR.get(type(first))
    if kind is not None:
        try:
            return np.array(samples, kind.dtype), kind
        except OverflowError:
            return None, kind
    if type(first) not in (np.ndarray, torch.Tensor):
        return None, _INTS
    kind_of: Any = kind_of_array if type(first) is np.ndarray else kind_of_tensor
    kinds = {(kind_of(sample), sample.shape) for sample in samples}
    kind, _ = kinds.pop()
    if kinds or kind is None:
        return None, _INTS
    if kind.torch_dtype is not None:
        return array_of_tensor(torch.stack(samples), kind.dtype), kind
    return np.stack(samples, dtype=kind.dtype), kind  # by itself it would choose the machine's byte order


def output_array(out: Any, shape: tuple[int, ...], kind: ArrayKind) -> Array:
    """An array over the memory of ``out``, in the dtype in which items are stored.

    Args:
        out: A tensor or an ndarray.
        shape: What it has to be.
        kind: What the rows are; its ``ndim`` is not looked at.

    Raises:
        TypeError: If rows cannot be gathered into it.
    """
    if type(out) is torch.Tensor and out.dtype is kind.torch_dtype and out.shape == shape:
        if out.layout is torch.strided and out.is_contiguous() and out.device.type == "cpu":
            return array_of_tensor(out.detach(), kind.dtype)
    elif isinstance(out, torch.Tensor):
        found = kind_of_tensor(out)
        fits = found is not None and out.is_contiguous() and found.dtype == kind.dtype
        fits = fits and kind.torch_dtype in (None, out.dtype)
        if fits and tuple(out.shape) == shape:
            return array_of_tensor(out.detach(), kind.dtype)
    elif isinstance(out, np.ndarray):
        named_by_numpy = kind.torch_dtype is None or DTYPES[CODE_OF_TORCH_DTYPE[kind.torch_dtype]].native
        if named_by_numpy and out.dtype == kind.dtype and out.shape == shape and out.flags.writeable:
            return out
    dtype = kind.torch_dtype or kind.dtype
    given = f"{type(out).__name__} of shape {tuple(getattr(out, 'shape', ()))}, {getattr(out, 'dtype', None)}"
    raise TypeError(
        f"rows are gathered into a contiguous tensor or ndarray of shape {shape}, {dtype}, not {given}"
    )


def outputs_by_name(out: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """The outputs for a record's columns; None for those that are not given."""
    names = tuple(names)
    if out is None:
        return dict.fromkeys(names)
    if not isinstance(out, Mapping) or set(out) - set(names):
        raise TypeError(f"records are gathered into a dict of outputs, with some of the keys {names}")
    return {name: out.get(name) for name in names}
