"""Columns of any picklable objects: one pickle per row, with the arrays inside lying outside of it.

ndarrays and tensors inside an object are read without a copy, as views of shared memory: ndarrays
read-only, tensors as `shmloader.store.arrays` says.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.shared_buffer import BufferBuilder, SharedBuffer
from shmloader.slot_writer import wrap_tensor
from shmloader.store.arrays import array_of_tensor, kind_of_tensor
from shmloader.store.columns import NoArrowTypeError, Scope, items
from shmloader.store.strings import append_offsets

_ALIGNMENT = 16  # of the buffers: enough for every dtype


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

    def __call__(self, part: memoryview, row: int) -> Any:
        return pickle.loads(part, buffers=self._buffers(row))

    def _buffers(self, row: int) -> Iterator[memoryview]:
        table, memory = self._table, self._memory
        for number in range(3 * self._counts[row], 3 * self._counts[row + 1], 3):
            offset, nbytes, of_tensor = table[number : number + 3]
            yield (memory.private if of_tensor else memory.view)[offset : offset + nbytes]


class _ObjectPickler(pickle.Pickler):
    """Puts the items of ndarrays and tensors aside."""

    def __init__(self, file: io.BytesIO, aside: list[tuple[memoryview, int]]) -> None:
        super().__init__(file, 5, buffer_callback=self._put_aside)
        self._aside = aside
        self._of_tensor: pickle.PickleBuffer | None = None  # the buffer that comes next, if a tensor's

    def _put_aside(self, buffer: pickle.PickleBuffer) -> None:
        self._aside.append((buffer.raw(), int(buffer is self._of_tensor)))

    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler``: what of arrays and tensors would not be put aside by itself."""
        if type(value) is np.ndarray and not value.flags.forc and not value.dtype.hasobject:
            return np.ascontiguousarray(value).__reduce_ex__(5)
        if type(value) is not torch.Tensor or value.requires_grad:
            return NotImplemented
        if value.layout is torch.sparse_coo and value.is_coalesced():
            # torch's own way keeps every such tensor that pickle.loads makes alive for good: it expects
            # torch.load to check them.
            return _make_sparse, (value.indices(), value.values(), tuple(value.shape))
        kind = kind_of_tensor(value)
        if kind is None:
            return NotImplemented
        flat = array_of_tensor(value, kind.dtype).reshape(-1)
        self._of_tensor = pickle.PickleBuffer(memoryview(flat.view(np.uint8).data))
        return _make_tensor, (self._of_tensor, CODE_OF_TORCH_DTYPE[value.dtype], tuple(value.shape))


def _make_tensor(buffer: memoryview, code: int, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = DTYPES[code]
    return wrap_tensor(np.ndarray(shape, dtype.carrier, buffer), dtype.torch_dtype)


def _make_sparse(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


def encode_pickles(values: list[Any], out: BufferBuilder) -> Pickles:
    """Encode any objects; whatever pickling them raises, if one cannot be pickled."""
    pickled: list[bytes] = []
    counts = [0]
    aside: list[tuple[memoryview, int]] = []
    for value in values:
        file = io.BytesIO()
        _ObjectPickler(file, aside).dump(value)
        pickled.append(file.getvalue())
        counts.append(len(aside))
    code, ends = append_offsets(np.fromiter(map(len, pickled), np.int64, len(pickled)), out)
    data = out.append_all(pickled)
    nbytes = sum(map(len, pickled))
    if not aside:
        return Pickles(len(values), code, ends, data, nbytes, -1, -1, 0)
    table = _append_aside(aside, out)
    return Pickles(
        len(values), code, ends, data, nbytes, out.append(np.array(counts, np.int64)), table, len(aside)
    )


def _append_aside(aside: list[tuple[memoryview, int]], out: BufferBuilder) -> int:
    lengths = np.array([view.nbytes for view, _ in aside], np.int64)
    steps = -(-lengths // _ALIGNMENT) * _ALIGNMENT
    padding = memoryview(bytes(_ALIGNMENT))
    views: list[memoryview] = []
    for (view, _), step, nbytes in zip(aside, steps.tolist(), lengths.tolist(), strict=True):
        views.append(view)
        if step > nbytes:
            views.append(padding[: step - nbytes])
    offset = out.append_all(views)
    places = offset + np.cumsum(steps) - steps
    flags = np.array([flag for _, flag in aside], np.int64)
    return out.append(np.ascontiguousarray(np.stack([places, lengths, flags], axis=1)))
