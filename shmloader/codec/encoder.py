"""The encoder: a batch to a slot. Runs in the worker."""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pickle import PickleBuffer
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.layout import ALIGNMENT, BYTES, ITEM_NBYTES, LONE_LEAF, join_header, pack_row
from shmloader.codec.leaves import (
    HANDLERS,
    LARGE_NBYTES,
    Add,
    LargeBytes,
    add_buffer,
    is_plain,
    shows_large_bytes,
)
from shmloader.codec.slot_allocator import SlotAllocator, make_placeholder


class Encoded(NamedTuple):
    """A batch after encoding."""

    header_begin: int  # bytes from the slot's start to the header
    header_end: int  # bytes from the slot's start to its end
    # The whole batch in private memory if it did not fit in the slot, else None.
    spilled: np.ndarray[Any, np.dtype[np.uint8]] | None


class _Written(list[bytes]):
    """A file for the pickler: a list of all that was written."""

    write = list.append


class _BatchPickler(ForkingPickler):
    """Pickles the structure of a batch; adds the memory of its leaves by ``add``.

    As torch's transport does, it knows the reducers that torch (for sparse and nested tensors, and those of
    other devices) and programs register with ``multiprocessing``. Buffers are left out of the pickle, each
    with a call of ``leave_out``.
    """

    def __init__(self, add: Add, leave_out: Callable[[PickleBuffer], None]) -> None:
        self.written = _Written()
        super().__init__(self.written, 5, True, leave_out)
        self._add = add

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object by its handler. Not called for built-in containers, numbers, strings, buffers."""
        handler = HANDLERS.get(type(obj))
        return NotImplemented if handler is None else handler(obj, self._add)


class _LargeBytesPickler(_BatchPickler):
    """Makes leaves also of large bytes, wherever they are. It is asked about every object, which takes time.

    The bytes arrive as what a persistent id stands for: containers are pickled as they are, with all that
    refers to them.
    """

    def __init__(self, add: Add, leave_out: Callable[[PickleBuffer], None]) -> None:
        super().__init__(add, leave_out)
        self._met: dict[int, LargeBytes] = {}  # by `id`: one object in two places stays one

    def persistent_id(self, obj: Any) -> LargeBytes | None:
        """A stand-in for large bytes, which is pickled in their place; None for other objects."""
        if type(obj) is not bytes or len(obj) < LARGE_NBYTES:
            return None
        return self._met.setdefault(id(obj), LargeBytes(obj))

    def clear_memo(self) -> None:
        """Forget the objects of a batch."""
        super().clear_memo()
        self._met.clear()


_ADDED = make_placeholder()
"""Stands for the leaf that was added last: the pickler meets it before any other is added."""

_MOST_KNOWN = 256  # headers and structures
_LONE_TENSOR: dict[tuple[Any, ...], bytes] = {(torch.Tensor, 1): LONE_LEAF}


class Encoder:
    """Writes batches into the slots of one `SlotAllocator`; lives in the worker."""

    def __init__(self, allocator: SlotAllocator) -> None:
        self._allocator = allocator
        self.copied_nbytes = 0  # bytes of all leaves so far that were copied in
        self._outputs: dict[PickleBuffer, bytes] = {}  # rows of those that collation has made
        self._rows: list[bytes] = []
        # Of leaves in private memory: offset in the slot, address, length, and what keeps the memory alive;
        # without an address that is a bytes object.
        self._copies: list[tuple[int, int | None, int, Any]] = []
        # Where the leaves that are in the slot begin and end, in ascending order; the first is at 0.
        self._taken = [0, 0]
        self._found: list[tuple[int, int]] | None = None
        self._pickler = _BatchPickler(self._add, self._leave_out)
        self._large_bytes_pickler = _LargeBytesPickler(self._add, self._leave_out)
        self._known = _LONE_TENSOR.copy()  # headers and structures that come again, see `_key_of`

    def encode(self, batch: Any, found: list[tuple[int, int]] | None = None) -> Encoded:
        """Write a batch into the slot that the allocator holds.

        Leaves that are already in the slot stay there; collation leaves their placeholders in the batch. The
        others are copied in, after the slot was grown to what the whole batch needs. ``found`` takes the
        address and the length of each leaf, as it was when the batch was made.
        """
        pickler, outputs = self._pickler, self._allocator.rows
        kind: type = type(batch)
        if kind is PickleBuffer and batch in outputs:
            return self._commit(join_header((LONE_LEAF,), (outputs[batch],)))
        key, tensors = _key_of(kind, batch)
        known = self._known.get(key)
        if known is not None and not tensors:
            return self._commit(known)
        self._outputs, self._found = outputs, found
        try:
            if known is not None:
                for tensor in tensors:  # in a third of the pickler's time
                    HANDLERS[torch.Tensor](tensor, self._add)
                return self._commit(join_header((known,), self._rows))
            if shows_large_bytes(batch):
                pickler = self._large_bytes_pickler
            pickler.dump(batch)
            header = join_header(pickler.written, self._rows)
            # It comes again with the same placeholders, but not with buffers of the program's.
            if key and outputs.keys() >= {one for one in key if type(one) is PickleBuffer}:
                if len(self._known) >= _MOST_KNOWN:  # full of shapes that do not repeat
                    self._known = _LONE_TENSOR.copy()
                self._known[key] = b"".join(pickler.written) if tensors else header
            return self._commit(header)
        finally:
            # The memo and the copies refer to the batch, which must be free to die now.
            pickler.clear_memo()
            self._rows.clear()
            self._copies.clear()
            del self._taken[2:]
            pickler.written.clear()

    def _add(self, kind: int, code: int, shape: Sequence[int], address: int | None, owner: Any) -> Any:
        """Find a leaf in the slot, or give it a place there and note it for copying: see `Add`.

        A view of another leaf gets a place of its own: in private memory both would.
        """
        item_nbytes = ITEM_NBYTES[code]
        nbytes = math.prod(shape) * item_nbytes
        offset = None
        if address is not None:
            if self._found is not None:
                self._found.append((address, nbytes))
            offset = self._allocator.offset_of(address, nbytes) if nbytes else 0
        if (
            offset is None
            or offset % (ALIGNMENT if kind == BYTES else item_nbytes)
            or (nbytes and not self._take(offset, offset + nbytes))
        ):
            offset = self._allocator.place(nbytes)
            self._copies.append((offset, address, nbytes, owner))
        self._rows.append(pack_row(kind, code, offset, shape))
        return _ADDED

    def _take(self, begin: int, end: int) -> bool:
        """Take a range of the slot for a leaf; False if another leaf of this batch has some of it."""
        taken = self._taken
        if begin >= taken[-1]:  # leaves mostly ascend
            taken += begin, end
            return True
        place = bisect_right(taken, begin)
        free = not place % 2 and place == bisect_left(taken, end)
        if free:
            taken[place:place] = begin, end
        return free

    def _leave_out(self, buffer: PickleBuffer) -> None:
        """Handle a buffer that the pickler leaves out: a placeholder, or one of an object's own reduction."""
        if buffer is _ADDED:
            return
        row = self._outputs.get(buffer)
        if row is None:
            add_buffer(buffer, self._add)
        else:
            self._rows.append(row)

    def _commit(self, header: bytes) -> Encoded:
        """Make room, copy in leaves from other memory, write the header."""
        allocator = self._allocator
        begin = allocator.place(len(header))
        total = begin + len(header)
        spilled, view = None, allocator.ensure(total)
        if view is None:
            spilled = np.empty(total, np.uint8)
            kept = min(total, allocator.nbytes)
            view = memoryview(spilled)  # type: ignore[arg-type]
            view[:kept] = allocator.view()[:kept]
        if self._copies:
            base = spilled.ctypes.data if spilled is not None else allocator.address
            for offset, address, nbytes, owner in self._copies:
                if address is None:
                    view[offset : offset + nbytes] = owner
                else:
                    ctypes.memmove(base + offset, address, nbytes)
                self.copied_nbytes += nbytes
        view[begin:total] = header
        return Encoded(begin, total, spilled)


def _key_of(kind: type, batch: Any) -> tuple[tuple[Any, ...], Sequence[torch.Tensor]]:
    """All that the header of a container of nothing but placeholders depends on, and no tensors.

    Of a tensor, or a container of tensors: all that the pickled structure depends on, and the tensors. Both
    are empty for other batches, and where a tensor is there twice, or is no leaf as it is.
    """
    names, values = (), batch
    if kind is dict:
        names, values = tuple(batch), tuple(batch.values())
    elif kind is torch.Tensor:
        values = (batch,)
    elif kind is not list and kind is not tuple:
        return (), ()
    kinds = set(map(type, values))
    if {str}.issuperset(map(type, names)):
        if kinds == {PickleBuffer}:
            return (kind, *names, *values), ()
        are_leaves = kinds == {torch.Tensor} and all(map(is_plain, values))
        if are_leaves and len(values) == len(set(map(id, values))):
            return (kind, *names, len(values)), values
    return (), ()
