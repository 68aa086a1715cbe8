"""Gathering rows of a `RowStore` by columns, with one call for each chunk of a column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import torch

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.store.arrays import Array, ArrayKind, array_of_tensor, kind_of_array, kind_of_tensor
from shmloader.store.chunks import ChunkReaders, Chunks
from shmloader.store.columns.classes import is_plain_namedtuple
from shmloader.store.columns.read import block_of, make_reader
from shmloader.store.columns.types import ArrayType, NamedTupleType, OptionalType, TupleType

_ROWS_WORTH_A_CALL = 16  # NumPy's calls for a chunk cost about as much as reading so many rows
_INTS, _FLOATS = ArrayKind(np.dtype(np.int64), 0), ArrayKind(np.dtype(np.float64), 0)
_KIND_OF_SCALAR = {int: _INTS, float: _FLOATS, bool: ArrayKind(np.dtype(np.bool_), 0)}


class Columns(Protocol):
    """The store whose rows are gathered."""

    chunks: Chunks

    def field(self, chunk: int) -> Any:
        """The values of a chunk, as an Arrow array."""

    def readers(self) -> ChunkReaders:
        """The functions that read the rows."""

    def __getitems__(self, indices: Any) -> list[Any]: ...


class _Part(NamedTuple):
    """What one chunk contributes: rows of its column, and where in the result they go."""

    chunk: int
    column: Any
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
        positions = np.flatnonzero(chunks == chunk)
        parts.append(_Part(chunk, store.field(chunk), rows[positions] - starts[chunk], positions))
    return _gather(parts, len(rows), store, out)


def _gather(parts: list[_Part], count: int, store: Columns, out: Any) -> Any:
    """Gather ``count`` rows out of chunks that hold the same data in, perhaps, different columns."""
    names = _names(parts)
    if names is not None:
        outs = outputs_by_name(out, names)
        return {name: _gather(_fields(parts, n), count, store, outs[name]) for n, name in enumerate(names)}
    length = _tuple_length(parts)
    if length and out is None:
        first = parts[0].column.type
        columns = [_gather(_fields(parts, n), count, store, None) for n in range(length)]
        if isinstance(first, NamedTupleType):
            fields = [field.name for field in first.storage_type]
            return tuple.__new__(store.chunks.finder.namedtuple(first.parameters["python"], fields), columns)
        return tuple(columns)
    blocks, kind = _blocks(parts, store)
    if blocks:
        return _gather_blocks(parts, blocks, kind, count, out)
    samples: list[Any] = [None] * count
    for part in parts:
        read = make_reader(part.column, store.readers().scope(part.chunk))
        for position, row in zip(part.positions.tolist(), part.rows.tolist(), strict=True):
            samples[position] = read(row)
    return join(samples, out)


def _names(parts: list[_Part]) -> list[str] | None:
    """The keys of rows that are all dicts with the same ones; else None."""
    found = {_keys(part.column) for part in parts}
    names = found.pop()
    return list(names) if names and not found else None


def _keys(column: Any) -> tuple[str, ...]:
    if not pa.types.is_struct(column.type) or column.null_count:
        return ()
    if any(isinstance(field.type, OptionalType) for field in column.type):
        return ()
    names = tuple(field.name for field in column.type)
    return names if len(set(names)) == len(names) else ()


def _tuple_length(parts: list[_Part]) -> int:
    """The length of rows that are all tuples of one class; else 0."""
    return (
        len(shapes.pop()[1]) if len(shapes := {tuple_shape(part.column.type) for part in parts}) == 1 else 0
    )


def tuple_shape(kind: Any) -> tuple[str, tuple[str, ...]]:
    """The class and the fields of tuples that all have the same; no fields for any other type."""
    if isinstance(kind, TupleType | NamedTupleType) and pa.types.is_struct(kind.storage_type):
        return kind.parameters.get("python", ""), tuple(field.name for field in kind.storage_type)
    return "", ()


def _fields(parts: list[_Part], number: int) -> list[_Part]:
    found = []
    for part in parts:
        column = part.column
        storage = column.storage if isinstance(column.type, pa.ExtensionType) else column
        found.append(part._replace(column=storage.field(number)))
    return found


def _blocks(parts: list[_Part], store: Columns) -> tuple[list[Array], ArrayKind]:
    """Each part's column as one array and what the rows are; no arrays where a column cannot be one."""
    arrays: list[Array] = []
    kinds = set()
    for part in parts:
        column = part.column
        if isinstance(column.type, ArrayType):
            is_block = not pa.types.is_dictionary(column.type.storage_type)
            found = block_of(column, store.chunks.memory(part.chunk)) if is_block else None
            if found is None:
                return [], _INTS
            arrays.append(found[0])
            kinds.add((found[1], found[0].shape[1:]))
        elif not column.null_count and _is_number(column.type):
            buffer = column.buffers()[1]
            dtype = np.dtype(column.type.to_pandas_dtype())
            arrays.append(np.frombuffer(buffer or b"", dtype)[column.offset : column.offset + len(column)])
            kinds.add((_FLOATS if dtype.kind == "f" else _INTS, ()))
        else:
            return [], _INTS
    return (arrays, kinds.pop()[0]) if len(kinds) == 1 else ([], _INTS)


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
