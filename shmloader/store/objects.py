"""Columns of any picklable objects: one pickle per row, with the arrays inside lying outside of it.

ndarrays and tensors inside an object are read without a copy, as views of shared memory: ndarrays
read-only, tensors as `shmloader.store.arrays` says.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.advice import add_advice
from shmloader.store.arrays import array_of_tensor, kind_of_tensor
from shmloader.store.columns import NoArrowTypeError, Scope, items
from shmloader.store.exact_dtypes import reduce_dtype
from shmloader.store.kept import LARGE_NBYTES, Kept, KeptValue
from shmloader.store.parts import first_offset
from shmloader.store.strings import append_offsets

_ALIGNMENT = 16  # of the buffers: enough for every dtype
_LEAST_COMPARED_NBYTES = 256  # of a buffer that is worth finding again


class Pickles(NamedTuple):
    """Any objects.

    Attributes:
        rows: How many.
        code: Type of the offsets, ``i`` or ``q``.
        ends: Of the ``rows + 1`` offsets.
        data: Of the first pickle.
        nbytes: Of all pickles.
        counts: Offset of the ``rows + 1`` sums of the rows' numbers of buffers, 64 bits; -1 where no row
            has any.
        table: Offset of three 64-bit numbers for each buffer: where it lies, its length in bytes, and 1
            for a tensor's.
        buffers: How many.
    """

    rows: int
    code: str
    ends: int
    data: int
    nbytes: int
    counts: int
    table: int
    buffers: int

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        data = scope.items(self.data, self.nbytes, "B")
        ends = scope.items(self.ends, self.rows + 1, self.code)
        part = f"{data}[{ends}[i] : {ends}[i + 1]]"
        if self.counts < 0:
            return f"{scope.bind(pickle.loads)}({part})"
        return f"{scope.bind(_LoadsWithBuffers(self, scope.memory))}({part}, i)"

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        raise NoArrowTypeError("some rows are of types that Arrow does not have; they are kept pickled")


class _LoadsWithBuffers:
    def __init__(self, column: Pickles, memory: SharedBuffer) -> None:
        self._counts = items(memory, column.counts, column.rows + 1, "q")
        self._table = items(memory, column.table, 3 * column.buffers, "q")
        self._memory = memory
        self._first = first_offset(memory)

    def __call__(self, part: memoryview, row: int) -> Any:
        return pickle.loads(part, buffers=self._buffers(row))

    def _buffers(self, row: int) -> Iterator[memoryview]:
        table, memory = self._table, self._memory
        for number in range(3 * self._counts[row], 3 * self._counts[row + 1], 3):
            offset, nbytes, of_tensor = table[number : number + 3]
            begin = offset - self._first
            yield (memory.private if of_tensor else memory.view)[begin : begin + nbytes]


class _Aside:
    """The buffers that pickles leave out: memory that several of them refer to once.

    Attributes:
        entries: For each buffer, in order: the number of its memory, and 1 for a tensor's.
        of_tensor: The buffer that comes next, if a tensor's.
    """

    def __init__(self, kept: Kept, out: BufferBuilder) -> None:
        self.entries: list[tuple[int, int]] = []
        self.of_tensor: pickle.PickleBuffer | None = None
        self._kept, self._out = kept, out
        self._views: list[memoryview] = []  # also keeps the memory alive, and so apart
        self._keys: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}

    def add(self, buffer: pickle.PickleBuffer) -> None:
        """Put a buffer aside."""
        view, of_tensor = buffer.raw(), int(buffer is self.of_tensor)
        if view.nbytes < _LEAST_COMPARED_NBYTES:
            key: Hashable = len(self._views)
        else:
            key = np.frombuffer(view, np.uint8).__array_interface__["data"][0], view.nbytes
        number = self._numbers.setdefault(key, len(self._views))
        if number == len(self._views):
            self._views.append(view)
            self._keys.append(key)
        self.entries.append((number, of_tensor))

    def append(self) -> int:
        """Append what is not in memory yet, and the table; returns the table's offset."""
        numbers, flags = np.array(self.entries, np.int64).T
        lengths = np.array([view.nbytes for view in self._views], np.int64)
        found = enumerate(map(self._kept.get, self._keys, self._views))
        known = {number: kept for number, kept in found if kept is not None}
        new = np.array([n for n in range(len(self._views)) if n not in known], np.int64)
        places = np.zeros(len(self._views), np.int64)
        for number, kept in known.items():
            self._kept.refer_to(self._keys[number])
            places[number] = kept.place
        places[new] = self._append_views([self._views[number] for number in new.tolist()], lengths[new])
        counts = np.bincount(numbers, minlength=len(self._views))
        for number in new.tolist():
            self._keep(number, int(places[number]), int(counts[number]))
        return self._out.append(np.stack([places[numbers], lengths[numbers], flags], axis=1))

    def _append_views(self, views: list[memoryview], lengths: Any) -> Any:
        steps = -(-lengths // _ALIGNMENT) * _ALIGNMENT
        padding = memoryview(bytes(_ALIGNMENT))
        padded: list[memoryview] = []
        for view, step, nbytes in zip(views, steps.tolist(), lengths.tolist(), strict=True):
            padded.append(view)
            if step > nbytes:
                padded.append(padding[: step - nbytes])
        return self._out.append_all(padded) + np.cumsum(steps) - steps

    def _keep(self, number: int, place: int, count: int) -> None:
        view = self._views[number]
        if view.nbytes < _LEAST_COMPARED_NBYTES:
            return
        if count > 1 or (not self._kept.streamed and view.nbytes >= LARGE_NBYTES):
            self._kept.add(self._keys[number], KeptValue(view, None, place, view.nbytes))


class _ObjectPickler(pickle.Pickler):
    """Puts the items of ndarrays and tensors aside."""

    def __init__(self, file: io.BytesIO, aside: _Aside, copies: dict[Hashable, tuple[Any, Any]]) -> None:
        # No method of the pickler's own: that would be a cycle of references. All that was pickled would wait
        # for Python's collector, and that crashes where it clears a memoryview that others view.
        super().__init__(file, 5, buffer_callback=aside.add)
        self._aside = aside
        self._copies = copies

    def _copied(self, key: Hashable, value: Any, copy: Callable[[Any], Any]) -> Any:
        """A contiguous copy, the same one for the same memory, which the first value keeps alive."""
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = value, copy(value)
        return found[1]

    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler``: what of arrays and tensors would not be put aside by itself."""
        if type(value) is np.ndarray and not value.flags.forc and not value.dtype.hasobject:
            key = value.__array_interface__["data"][0], value.shape, value.strides, value.dtype
            return self._copied(key, value, np.ascontiguousarray).__reduce_ex__(5)
        if type(value) is not torch.Tensor or value.requires_grad:
            return reduce_dtype(value)
        if value.layout is torch.sparse_coo and value.is_coalesced():
            # torch's own way keeps every such tensor that pickle.loads makes alive for good: it expects
            # torch.load to check them.
            return _make_sparse, (value.indices(), value.values(), tuple(value.shape))
        kind = kind_of_tensor(value)
        if kind is None:
            return NotImplemented
        if not value.is_contiguous():
            memory = value.data_ptr(), value.shape, value.stride(), value.dtype
            value = self._copied(memory, value, torch.Tensor.contiguous)
        flat = array_of_tensor(value, kind.dtype).reshape(-1)
        buffer = self._aside.of_tensor = pickle.PickleBuffer(memoryview(flat.view(np.uint8).data))
        return _make_tensor, (buffer, CODE_OF_TORCH_DTYPE[value.dtype], tuple(value.shape))


def _make_tensor(buffer: memoryview, code: int, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = DTYPES[code]
    return wrap_tensor(np.ndarray(shape, dtype.carrier, buffer), dtype.torch_dtype)


def _make_sparse(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


def encode_pickles(values: list[Any], kept: Kept, out: BufferBuilder) -> Pickles:
    """Encode any objects; whatever pickling them raises, if one cannot be pickled.

    Args:
        values: The objects.
        kept: Memory that pickles may refer to again.
        out: Where to.
    """
    pickled: list[bytes] = []
    counts = [0]
    aside = _Aside(kept, out)
    copies: dict[Hashable, tuple[Any, Any]] = {}
    for value in values:
        file = io.BytesIO()
        try:
            _ObjectPickler(file, aside, copies).dump(value)
        except RecursionError as error:
            add_advice(error, f"pickling a {type(value).__qualname__}")
            raise
        except Exception as error:
            error.add_note(
                f"shmloader: this was raised while pickling a {type(value).__qualname__}, as values are kept "
                "of which no column gives back what was given. Its class must be found by name in a module, "
                "and what it holds be picklable: leave out or convert what is not."
            )
            raise
        pickled.append(file.getvalue())
        counts.append(len(aside.entries))
    code, ends = append_offsets(np.fromiter(map(len, pickled), np.int64, len(pickled)), out)
    data = out.append_all(pickled)
    nbytes = sum(map(len, pickled))
    if not aside.entries:
        return Pickles(len(values), code, ends, data, nbytes, -1, -1, 0)
    table = aside.append()
    at = out.append(np.array(counts, np.int64))
    return Pickles(len(values), code, ends, data, nbytes, at, table, len(aside.entries))
