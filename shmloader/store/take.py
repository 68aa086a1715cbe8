"""Gathering rows of a `RowStore` by columns, with one call for each column."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from shmloader.codec.array_kinds import (
    Array,
    ArrayKind,
    array_of_tensor,
    kind_of_array,
    kind_of_tensor,
    wrap_array,
)
from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.store.chunks import Chunks, Column
from shmloader.store.columns.arrays import NUMBERS
from shmloader.store.columns.buffers import bits_of
from shmloader.store.columns.classes import is_plain_namedtuple
from shmloader.store.columns.kind import Block, block_of, storage_of
from shmloader.store.columns.records import Namedtuples, Tuples, keys_of, types_of_fields
from shmloader.store.columns.values import KIND_OF_SCALAR
from shmloader.store.ranges import RangeFinder, Rows

_ROWS_WORTH_A_CALL = 16  # gathering a column costs about as much as reading so many rows

_MISFIT = "rows such as {!r:.200} cannot be gathered into an output"

_Gather = Callable[[Rows, Rows, Any], Any]
"""Gathers rows, numbered from 0 on, of these chunks into outputs."""


class ColumnGatherer:
    """Gathers rows of the columns of a store; made once, so that each call does only what its rows need."""

    def __init__(self, column: Column) -> None:
        self._rows = len(column)
        self._read = column
        self._chunk_of = RangeFinder(column.starts)
        self._gather = gather = _gather_of(column) if self._rows else None
        self._direct = gather if isinstance(gather, _Items) and gather.is_direct(self._rows) else None

    def directly(self, indices: Any, out: Any) -> torch.Tensor | None:
        """Gather rows of tensors with the fewest calls; None if `__call__` has to."""
        if self._direct is None or type(indices) is not torch.Tensor or indices.dtype is not torch.int64:
            return None
        return self._direct.gather_directly(indices, out)

    def __call__(self, rows: Rows, out: Any = None) -> Any:
        """Gather rows, numbered from 0 on; see `Store.take`.

        ``out`` may also be a function that makes the output of each column, or makes None. It is given the
        shape, the NumPy dtype, and torch's if rows are tensors.
        """
        if self._gather is None:
            return [] if out is None else out
        if 0 < len(rows) < _ROWS_WORTH_A_CALL:
            return join(list(map(self._read, rows.tolist())), out)
        if not (rows.flags.c_contiguous and rows.flags.writeable):
            rows = rows.copy()  # torch takes no array that is read-only, or runs backwards
        return self._gather(rows, self._chunk_of(rows), out)


def _gather_of(column: Column) -> _Gather:
    """The function that gathers a column: of records, of items, or of values that are read one by one."""
    arrays = column.arrays()
    (of, names), *others = set(map(_shape_of_rows, arrays))

    def by_rows(rows: Rows, chunk_of: Rows, out: Any) -> Any:
        return join(list(map(column, rows.tolist())), out)

    if of is dict and names and not others:
        fields = {name: _gather_of(column.field(name)) for name in names}

        def gather_records(rows: Rows, chunk_of: Rows, out: Any) -> Any:
            outs = _outputs_by_name(out, fields)
            return {name: gather(rows, chunk_of, outs[name]) for name, gather in fields.items()}

        return gather_records
    if names and not others:
        kind = tuple if of is tuple else column.chunks.finder.find(arrays[0].type)
        items = [_gather_of(column.field(place)) for place in range(len(names))]

        def gather_tuples(rows: Rows, chunk_of: Rows, out: Any) -> Any:
            if _is_memory(out):
                return by_rows(rows, chunk_of, out)
            return tuple.__new__(kind, [gather(rows, chunk_of, out) for gather in items])

        return gather_tuples
    return _items_of(arrays, column.chunks) or by_rows


class _Items:
    """A column whose rows all have one kind: its chunks, by dtype and memory."""

    def __init__(self, block: Block, items: _Pieces, valid: _Pieces | None) -> None:
        self._block = block
        self._kind = block.kind
        self._shape = () if block.bit is not None else block.items.shape[1:]
        self._items = items
        self._valid = valid

    def is_direct(self, rows: int) -> bool:
        """Whether the rows are one tensor, so that torch notices every row number that is out of range."""
        first, *others = self._items.pieces
        is_whole = isinstance(first, _Piece) and first.is_plain and len(first.items) == rows
        return is_whole and not others and self._valid is None

    def gather_directly(self, indices: torch.Tensor, out: Any) -> torch.Tensor | None:
        """Gather rows of tensors by indices that have not been looked at; None if they need that."""
        dtype, shape = self._kind.torch_dtype, (indices.numel(), *self._shape)
        if out is None and dtype is not None:
            out = torch.empty(shape, dtype=dtype, device="cpu")
        if type(out) is not torch.Tensor or out.dtype is not dtype or out.shape != shape or out.requires_grad:
            return None
        if indices.dim() != 1 or not (indices.is_cpu and out.is_contiguous() and out.is_cpu and out.numel()):
            return None
        try:
            self._items.pieces[0].select(indices, out)
        except (IndexError, RuntimeError):  # of torch: an output that overlaps the indices, say
            return None
        return out

    def __call__(self, rows: Rows, chunk_of: Rows, out: Any) -> Any:
        """Gather rows of these chunks: into one array or tensor, or as a list where some are None."""
        kind, shape, missing = self._kind, (len(rows), *self._shape), []
        if self._valid is not None:
            is_there = self._valid.gather(rows, chunk_of, np.empty(len(rows), np.bool_))
            missing = np.flatnonzero(~is_there).tolist()
        is_array = self._block.stacks and not missing
        if not is_array and _is_memory(out):
            raise TypeError(_MISFIT.format([None] if missing else [[...]]))
        out = _given(out, shape, kind) if is_array else None
        target = np.empty(shape, kind.dtype) if out is None else output_array(out, shape, kind)
        self._items.gather(rows, chunk_of, target)
        if out is not None:
            return out
        gathered = wrap_array(target, kind)
        if is_array:
            return gathered
        found = self._block.rows(gathered)
        for row in missing:
            found[row] = None
        return found


class _Pieces:
    """Pieces of memory that have the rows of a column."""

    def __init__(self, blocks: dict[int, Block], chunks: Chunks) -> None:
        alike: dict[Any, dict[int, Block]] = {}
        for chunk, block in blocks.items():
            items = block.items
            key = items.dtype, items.strides[0], block.bit is None, id(chunks.memories[chunk])
            alike.setdefault(key, {})[chunk] = block
        piece_of = np.full(len(chunks.memories), len(alike))
        for number, some in enumerate(alike.values()):
            piece_of[list(some)] = number
        self.pieces: list[Any] = [
            (_Piece if next(iter(some.values())).bit is None else _Bits)(some, chunks)
            for some in alike.values()
        ]
        self._piece_of = piece_of if len(alike) > 1 or len(blocks) < len(piece_of) else None

    def gather(self, rows: Rows, chunk_of: Rows, target: Array) -> Array:
        """Gather rows of these chunks into an array; those of no piece are True."""
        if self._piece_of is None:
            self.pieces[0].gather(rows, chunk_of, target)
            return target
        numbers = self._piece_of[chunk_of]
        for number, piece in enumerate(self.pieces):
            chosen = np.flatnonzero(numbers == number)
            part = np.empty((len(chosen), *target.shape[1:]), piece.dtype)
            piece.gather(rows[chosen], chunk_of[chosen], part)
            target[chosen] = part
        if len(rows):
            target[numbers == len(self.pieces)] = True
        return target


class _Bits:
    """Chunks of a column of bits in one piece of memory, which is seen as bytes."""

    dtype = np.dtype(np.bool_)

    def __init__(self, blocks: dict[int, Block], chunks: Chunks) -> None:
        memory = chunks.memories[next(iter(blocks))]
        self._octets = np.frombuffer(memory.view, np.uint8)
        bases = np.zeros(len(chunks.memories), np.int64)
        for chunk, block in blocks.items():
            bases[chunk] = (
                (_address(block.items) - memory.address) * 8 + (block.bit or 0) - chunks.starts[chunk]
            )
        self._bases = bases

    def gather(self, rows: Rows, chunk_of: Rows, target: Array) -> None:
        """Gather the bits of rows of these chunks."""
        places = self._bases.take(chunk_of, mode="clip") + rows
        target[...] = self._octets[places >> 3] >> (places & 7).astype(np.uint8) & 1


class _Piece:
    """Chunks of a column whose items have one dtype, one distance, and lie in one piece of memory.

    That memory is seen as overlapping items, one every ``unit`` bytes: a unit divides a row's size, the
    distance of rows, and where chunks begin. So rows of all chunks are gathered with one call.
    """

    def __init__(self, found: dict[int, Block], chunks: Chunks) -> None:
        blocks = {chunk: block.items for chunk, block in found.items()}
        chunk, first = next(iter(blocks.items()))
        memory, starts = chunks.memories[chunk], chunks.starts
        self.dtype = first.dtype
        size = first.dtype.itemsize * math.prod(first.shape[1:])
        addresses = {chunk: _address(block) for chunk, block in blocks.items()}
        stride, low = first.strides[0], min(addresses.values())
        ends = [addresses[chunk] + (len(block) - 1) * stride + size for chunk, block in blocks.items()]
        nbytes = max(ends) - low
        unit = math.gcd(size, stride, *(address - low for address in addresses.values()))
        word = math.gcd(unit, 8)
        inner = 1 if size == word else 2  # dimensions
        shape, strides = ((nbytes - size) // unit + 1, size // word)[:inner], (unit, word)[:inner]
        items: Array = np.ndarray(shape, f"i{word}", memory.private, low - memory.address, strides)
        self.items = torch.from_numpy(items)
        # Of one word each, which NumPy gathers more quickly than torch, if it need not align them first.
        self._words = items if inner == 1 and items.flags.c_contiguous and items.flags.aligned else None
        if self._words is not None and first.ndim == 1:
            self._words = self._words.view(self.dtype)
        self._step = stride // unit
        bases = np.zeros(len(starts) - 1, np.int64)
        for chunk, address in addresses.items():
            bases[chunk] = (address - low) // unit - starts[chunk] * self._step
        self._bases = bases
        # Whether row n is item n: chunks lie one behind the other.
        self.is_plain = self._step == 1 and not bases.any()

    def gather(self, rows: Rows, chunk_of: Rows, target: Array) -> None:
        """Gather rows of these chunks into an array, converted where its dtype is another."""
        is_direct = target.dtype == self.dtype and target.flags.c_contiguous
        array = target if is_direct else np.empty(target.shape, self.dtype)
        if len(rows):
            places = rows
            if not self.is_plain:
                places = self._bases.take(chunk_of, mode="clip")  # which is the quickest way
                places += rows * self._step if self._step > 1 else rows
            words = self._words
            if words is not None and array.flags.aligned:
                out: Array = (
                    array if words.dtype == array.dtype else np.ndarray(len(rows), words.dtype, array)
                )
                words.take(places, out=out, mode="clip")  # else it would use a buffer
            else:
                octets: Array = np.ndarray((len(rows), array.nbytes // len(rows)), np.uint8, array)
                self.select(torch.from_numpy(places), torch.from_numpy(octets))
        if not is_direct:
            target[...] = array

    def select(self, places: torch.Tensor, target: torch.Tensor) -> None:
        """Gather the items at some places into a contiguous tensor of any dtype."""
        wide = self.items.dim()
        words = (target if target.dim() == wide else target.view(len(places), -1)).view(self.items.dtype)
        torch.index_select(self.items, 0, places, out=words if wide > 1 else words.view(-1))


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _items_of(columns: list[Any], chunks: Chunks) -> _Items | None:
    """The pieces of a column; None if its rows are not all of one kind, or not numbers and arrays."""
    blocks, valid, alike = {}, {}, set()
    for number, column in enumerate(columns):
        memory = chunks.memories[number]
        block = block_of(column, memory, nulls=False)
        if block is None:
            return None
        blocks[number] = block
        storage = storage_of(column)
        alike.add((block.kind, block.items.shape[1:], block.bit is None, block.stacks))
        rows = len(column) if block.bit is None else -(-(block.bit + len(column)) // 8)
        is_inside = block.items.nbytes and memory.holds(_address(block.items), block.items.nbytes)
        if len(alike) > 1 or len(block.items) != rows or not is_inside:
            return None
        if storage.null_count:
            bits, bit = bits_of(storage, 0), storage.offset & 7
            if len(bits) * 8 < bit + len(column) or not memory.holds(_address(bits), bits.nbytes):
                return None
            valid[number] = Block(bits, KIND_OF_SCALAR[bool], list, bit=bit)
    nulls = _Pieces(valid, chunks) if valid else None
    return _Items(blocks[0], _Pieces(blocks, chunks), nulls)


def _shape_of_rows(column: Any) -> tuple[Any, tuple[str, ...]]:
    """The kind of rows that all have the same fields, and these fields; None for other rows.

    The kind is ``dict``, ``tuple``, or the name of a class.
    """
    kind, storage = column.type, storage_of(column)
    if not pa.types.is_struct(storage.type) or storage.null_count or keys_of(storage) is not None:
        return None, ()
    if isinstance(kind, Tuples | Namedtuples):
        python = kind.parameters["python"] if isinstance(kind, Namedtuples) else tuple
        return python, tuple(types_of_fields(storage.type))
    return (dict, tuple(types_of_fields(kind))) if storage is column else (None, ())


def join(samples: list[Any], out: Any) -> Any:
    """Turn rows that were read one by one into columns."""
    if len(set(map(type, samples))) == 1:
        first = samples[0]
        # Of a subclass (an OrderedDict, a defaultdict) columns would not say that the rows are of it.
        if type(first) is dict and len({tuple(sample) for sample in samples}) == 1:
            outs = _outputs_by_name(out, first)
            return {name: join([sample[name] for sample in samples], outs[name]) for name in first}
        plain = not _is_memory(out) and (type(first) is tuple or is_plain_namedtuple(type(first)))
        if plain and len(set(map(len, samples))) == 1:
            columns = [join(list(column), out) for column in zip(*samples, strict=True)]
            return tuple.__new__(type(first), columns)
        stacked = _stack(samples, first)
        if stacked is not None:
            array, kind = stacked
            out = _given(out, array.shape, kind)
            if out is None:
                return wrap_array(array, kind)
            output_array(out, array.shape, kind)[...] = array
            return out
    if _is_memory(out):
        raise TypeError(_MISFIT.format(samples[:1]))
    return samples


def _stack(samples: list[Any], first: Any) -> tuple[Array, ArrayKind] | None:
    """Samples of one type as one array and what its rows are; None if they are not to be joined."""
    kind = KIND_OF_SCALAR.get(type(first))
    if kind is not None:
        try:
            return np.array(samples, kind.dtype), kind
        except OverflowError:
            return None
    kind_of: Any = {torch.Tensor: kind_of_tensor}.get(type(first), kind_of_array)
    is_array = type(first) in (np.ndarray, torch.Tensor)
    is_array |= isinstance(first, np.generic) and first.dtype.kind in NUMBERS
    kinds = {(kind_of(sample), sample.shape) for sample in samples} if is_array else {(None, ())}
    kind, _ = kinds.pop()
    if kinds or kind is None:
        return None
    if kind.torch_dtype is not None:
        return array_of_tensor(torch.stack(samples), kind.dtype), kind
    return np.stack(samples, dtype=kind.dtype), kind  # by itself it would choose the machine's byte order


def _is_memory(out: Any) -> bool:
    return out is not None and not callable(out)


def _given(out: Any, shape: tuple[int, ...], kind: ArrayKind) -> Any:
    """The output for rows of a kind, made if ``out`` is a function."""
    return out(shape, kind.dtype, kind.torch_dtype) if callable(out) else out


def output_array(out: Any, shape: tuple[int, ...], kind: ArrayKind) -> Array:
    """An array over the memory of an output, in the dtype in which items of a kind are stored.

    TypeError if rows of this shape cannot be gathered into it; the kind's ``ndim`` is not looked at.
    """
    if isinstance(out, torch.Tensor):
        plain = out.detach() if type(out) is torch.Tensor else out
        found = kind_of_tensor(plain)
        fits = found is not None and plain.is_contiguous() and found.dtype == kind.dtype
        if fits and tuple(out.shape) == shape and kind.torch_dtype in (None, out.dtype):
            return array_of_tensor(plain.detach(), kind.dtype)
    elif isinstance(out, np.ndarray):
        named_by_numpy = kind.torch_dtype is None or DTYPES[CODE_OF_TORCH_DTYPE[kind.torch_dtype]].native
        if named_by_numpy and out.dtype == kind.dtype and out.shape == shape and out.flags.writeable:
            return out
    dtype = kind.torch_dtype or kind.dtype
    given = f"{type(out).__name__} of shape {tuple(getattr(out, 'shape', ()))}, {getattr(out, 'dtype', None)}"
    if isinstance(out, torch.Tensor):
        is_scattered = out.layout is torch.strided and not out.is_contiguous()
        given += f", {out.layout}, on {out.device}" + ", not contiguous" * is_scattered
    elif isinstance(out, np.ndarray) and not out.flags.writeable:
        given += ", read-only"
    raise TypeError(
        f"rows are gathered into a contiguous tensor or ndarray of shape {shape}, {dtype}, not {given}"
    )


def _outputs_by_name(out: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """The outputs for a record's columns; None for those that are not given."""
    names = tuple(names)
    if not _is_memory(out):
        return dict.fromkeys(names, out)
    if not isinstance(out, Mapping) or set(out) - set(names):
        raise TypeError(f"records are gathered into a dict of outputs, with some of the keys {names}")
    return {name: out.get(name) for name in names}
