"""Values that several rows share: each is kept once, and every row has its place.

Rows often refer to one and the same object: a vocabulary in each record, the array of a clip in each of its
frames. Encoded row by row, the store would hold it once per row. What is the same object is found by ``id``,
within a chunk, and for what has repeated (or is large) across chunks too: a column is only offsets into the
memory, so a later chunk can refer to an earlier one's.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.shared_buffer import BufferBuilder, SharedBuffer
from shmloader.store.arrays import array_of_tensor, kind_of_tensor
from shmloader.store.columns import Column, Scope, items
from shmloader.store.size import mean_stored_nbytes
from shmloader.store.unions import MOST_KINDS

LARGE_NBYTES = 1 << 12
"""Values from here on are worth an entry each in `Kept`, also if they have not repeated yet."""

_PLACE_NBYTES = 4
_LEAST_NBYTES = 16  # of a value that is worth a place, and a call when it is read
_SAMPLED = 256
_SAMPLED_KEYS = 64
_MOST_KEPT = 1 << 17
_MOST_COLUMNS = 64  # inside one that is kept: chunks that refer to it describe it again


class Repeated(NamedTuple):
    """Rows that refer to fewer values, each of which is kept once.

    Attributes:
        rows: How many.
        tags: Offset of the number of each row's column in ``of``, one byte; -1 where there is but one.
        places: Offset of each row's number within its column, 32 bits.
        of: The columns of the values; those of earlier chunks may be among them.
    """

    rows: int
    tags: int
    places: int
    of: tuple[Column, ...]

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        places = scope.items(self.places, self.rows, "i")
        if self.tags < 0:
            return f"{scope.bind(scope.reader_of_shared(self.of[0]))}({places}[i])"
        readers = scope.bind(tuple(map(scope.reader_of_shared, self.of)))
        return f"{readers}[{scope.items(self.tags, self.rows, 'b')}[i]]({places}[i])"

    def referred(self, memory: SharedBuffer, rows: Any = slice(None)) -> list[tuple[Column, Any, Any]]:
        """What rows refer to: for each column which of ``rows`` do so, and to which of its values."""
        places = np.asarray(items(memory, self.places, self.rows, "i"))[rows]
        if self.tags < 0:
            return [(self.of[0], slice(None), places)]
        tags = np.asarray(items(memory, self.tags, self.rows, "b"))[rows]
        chosen = [np.flatnonzero(tags == tag) for tag in range(len(self.of))]
        return [(column, which, places[which]) for column, which in zip(self.of, chosen, strict=True)]

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`: a dictionary array; numbers are small enough to be written out."""
        import pyarrow as pa

        values, indices = self._arrow_values(memory)
        if pa.types.is_primitive(values.type) or pa.types.is_null(values.type):
            return values.take(pa.array(indices))
        return pa.DictionaryArray.from_arrays(pa.array(indices), values)

    def written_out(self, memory: SharedBuffer) -> Any:
        """As `to_arrow`, but with each value as often as it occurs, copied."""
        import pyarrow as pa

        values, indices = self._arrow_values(memory)
        return values.take(pa.array(indices))

    def _arrow_values(self, memory: SharedBuffer) -> tuple[Any, np.ndarray[Any, np.dtype[np.int32]]]:
        """The values as one Arrow array, and the number in it of each row's."""
        import pyarrow as pa

        parts = self.referred(memory)
        if len(parts) == 1:
            return parts[0][0].to_arrow(memory), parts[0][2]
        # Of several columns Arrow makes one only by copying: so just the values that are referred to.
        indices = np.empty(self.rows, np.int32)
        arrays, begin = [], 0
        for column, rows, places in parts:
            used, numbers = np.unique(places, return_inverse=True)
            arrays.append(column.to_arrow(memory).take(pa.array(used)))
            indices[rows] = begin + numbers
            begin += len(used)
        kind = common_type([array.type for array in arrays])
        return pa.concat_arrays([a if a.type == kind else a.cast(kind) for a in arrays]), indices


def common_type(types: Sequence[Any]) -> Any:
    """The Arrow type that values of several types can be converted to; ``pa.ArrowInvalid`` if none."""
    import pyarrow as pa

    schemas = [pa.schema([("", kind)]) for kind in dict.fromkeys(types)]
    return pa.unify_schemas(schemas, promote_options="permissive")[0].type


class KeptValue(NamedTuple):
    """A value that is in shared memory already.

    Attributes:
        value: The object, alive: no other object can get its ``id``.
        column: The column that holds it; None for bare memory.
        place: Its row there; for bare memory the offset.
        nbytes: Of shared memory that it took, about.
    """

    value: Any
    column: Column | None
    place: int
    nbytes: int


class Kept:
    """What has been encoded and may be referred to again, by ``id`` or another key.

    Bounded in number. Where nobody else keeps the rows (``streamed``), also bounded in size, except for the
    few that were used last: what is kept here would otherwise be gone.

    Attributes:
        streamed: Whether rows are gone when their chunk has been encoded.
        once_nbytes: Bytes of values each of which was the only one in its column: more rows do not add to
            them.
    """

    def __init__(self, out: BufferBuilder, streamed: bool = False) -> None:
        self.streamed = streamed
        self.once_nbytes = 0
        self._out = out
        self._values: dict[Hashable, KeptValue] = {}  # those used last are last
        self._digests: dict[Hashable, bytes] = {}
        self._nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def has_any(self, keys: set[Any]) -> bool:
        """Whether any of some keys is here."""
        return not self._values.keys().isdisjoint(keys)

    def get(self, key: Hashable, value: Any) -> KeptValue | None:
        """What is kept under a key, and now the last to be forgotten.

        Args:
            key: The key.
            value: What has it now. The code that makes a stream's rows runs between two chunks, and may have
                written to it: then it is not what is kept.
        """
        kept = self._values.get(key)
        if kept is not None and self.streamed:
            del self._values[key]
            if _digest(value) != self._digests[key]:
                self._nbytes -= kept.nbytes
                return None
            self._values[key] = kept
        return kept

    def add(self, key: Hashable, kept: KeptValue) -> None:
        """Keep a value, and perhaps forget others."""
        if key in self._values:
            return
        self._values[key] = kept
        if self.streamed:
            self._digests[key] = _digest(kept.value)
        self._nbytes += kept.nbytes
        while len(self._values) > _MOST_KEPT or (self._is_too_much() and len(self._values) > 8):
            oldest = next(iter(self._values))
            self._nbytes -= self._values.pop(oldest).nbytes
            self._digests.pop(oldest, None)

    def _is_too_much(self) -> bool:
        return self.streamed and self._nbytes > max(16 << 20, self._out.nbytes // 16)


def _digest(value: Any) -> bytes:
    """What tells whether a value has been written to; equal for the same value only."""
    if isinstance(value, torch.Tensor) and kind_of_tensor(value) is not None:
        value = array_of_tensor(value, DTYPES[CODE_OF_TORCH_DTYPE[value.dtype]].carrier)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        value = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    if not isinstance(value, memoryview):
        try:
            value = pickle.dumps(value, 5)
        except Exception:  # noqa: BLE001 - then it cannot be told
            value = secrets.token_bytes(16)
    return hashlib.blake2b(value, digest_size=16).digest()


def encode_repeats(
    values: list[Any],
    encode: Callable[[list[Any]], Column],
    kept: Kept,
    out: BufferBuilder,
    look_at_all: bool,
) -> Column:
    """Encode values, each object once.

    Args:
        values: Objects that are alive until all is encoded, or are not made for this call alone.
        encode: Encodes those that are not in memory yet.
        kept: What is.
        out: Where to.
        look_at_all: Whether to compare all values, or only if a sample of them is worth it.

    Returns:
        A `Repeated` column; what ``encode`` returned where that is not larger.
    """
    if not look_at_all:
        samples = _samples(values, _SAMPLED)
        if not any(_are_likely(list(map(id, sample)), kept) for sample in samples):
            return encode(values)
    if not _are_likely(list(map(id, values)), kept):
        return _encode_new(values, id, encode, kept)
    return _encode_by_key(list(map(id, values)), values, encode, kept, out)


def encode_by_memory(
    values: list[Any],
    key_of: Callable[[Any], Hashable],
    encode: Callable[[list[Any]], Column],
    kept: Kept,
    out: BufferBuilder,
) -> Column:
    """As `encode_repeats`, for different objects (views) that have the same memory, as a key tells.

    Keys take longer to make than ``id``: all are made only if a sample is worth it.
    """
    if mean_stored_nbytes(values) < LARGE_NBYTES // 4:
        return encode(values)
    samples = _samples(values, _SAMPLED_KEYS)
    if not any(_are_likely(list(map(key_of, sample)), kept) for sample in samples):
        return _encode_new(values, key_of, encode, kept)
    return _encode_by_key(list(map(key_of, values)), values, encode, kept, out)


def _samples(values: list[Any], most: int) -> list[list[Any]]:
    """Values among which repetitions are looked for: some at equal distances, and some neighbours."""
    rows = len(values)
    count = min(most, max(_SAMPLED_KEYS, rows // _SAMPLED_KEYS))
    if rows <= 2 * count:
        return [values]
    return [values[:: rows // count], values[rows // 2 : rows // 2 + count]]


def _are_likely(keys: list[Any], kept: Kept) -> bool:
    distinct = set(keys)
    return len(distinct) < len(keys) or (bool(kept) and kept.has_any(distinct))


def _encode_new(
    values: list[Any],
    key_of: Callable[[Any], Hashable],
    encode: Callable[[list[Any]], Column],
    kept: Kept,
) -> Column:
    """Encode values that do not repeat; large ones may do so later."""
    column = encode(values)
    nbytes = 0 if kept.streamed else round(mean_stored_nbytes(values))
    if nbytes >= LARGE_NBYTES and _weight(column) <= _MOST_COLUMNS:
        for row, value in enumerate(values):
            kept.add(key_of(value), KeptValue(value, column, row, nbytes))
    return column


def _encode_by_key(
    keys: list[Any],
    values: list[Any],
    encode: Callable[[list[Any]], Column],
    kept: Kept,
    out: BufferBuilder,
) -> Column:
    """Encode values, those with the same key once, if that is worth it."""
    row_of = dict(zip(keys, range(len(keys)), strict=True))
    known: dict[Any, KeptValue] = {}
    if kept:
        found = ((key, kept.get(key, values[row])) for key, row in row_of.items())
        known = {key: one for key, one in found if one is not None}
    again = [values[row] for row, key in enumerate(keys) if row_of[key] != row]  # row_of has a key's last row
    mean_nbytes = _mean_nbytes(again)
    spared_nbytes = len(again) * mean_nbytes + sum(one.nbytes for one in known.values())
    if (mean_nbytes < _LEAST_NBYTES and not known) or spared_nbytes < 2 * _PLACE_NBYTES * len(keys):
        return encode(values)
    return _Encoding(keys, values, row_of, known, kept, out).finish(encode)


def _mean_nbytes(again: list[Any]) -> float:
    """Of rows that repeat earlier ones: what each would take, weighed by how often its value does."""
    if not again:
        return 0.0
    counts = Counter(map(id, again))
    if len(counts) > _SAMPLED:
        return mean_stored_nbytes(again)
    value_of = {id(value): value for value in again}
    nbytes = sum(count * mean_stored_nbytes([value_of[key]]) for key, count in counts.items())
    return nbytes / len(again)


class _Encoding:
    """One column while it is encoded: which value is in which column, by the number of its key."""

    def __init__(
        self,
        keys: list[Any],
        values: list[Any],
        row_of: dict[Any, int],
        known: dict[Any, KeptValue],
        kept: Kept,
        out: BufferBuilder,
    ) -> None:
        number_of = {key: number for number, key in enumerate(row_of)}
        self._numbers = np.fromiter(map(number_of.__getitem__, keys), np.int32, len(keys))
        self._keys = list(row_of)
        self._values = [values[row] for row in row_of.values()]
        self._tags = np.full(len(row_of), -1, np.int8)
        self._places = np.zeros(len(row_of), np.int32)
        self._columns: list[Column] = []
        self._kept, self._out = kept, out
        self._refer_to(known, number_of)

    def _refer_to(self, known: dict[Any, KeptValue], number_of: dict[Any, int]) -> None:
        tag_of: dict[int, int] = {}
        for key, kept in known.items():
            if kept.column is None:  # bare memory, which has keys of its own
                continue
            tag = tag_of.setdefault(id(kept.column), len(tag_of))
            if tag == len(self._columns):
                if tag == MOST_KINDS - 1:  # what is in further columns is encoded once more
                    del tag_of[id(kept.column)]
                    continue
                self._columns.append(kept.column)
            self._tags[number_of[key]] = tag
            self._places[number_of[key]] = kept.place

    def finish(self, encode: Callable[[list[Any]], Column]) -> Column:
        new = np.flatnonzero(self._tags < 0)
        if len(new):
            once_nbytes, begin_nbytes = self._kept.once_nbytes, self._out.nbytes
            column = encode([self._values[number] for number in new.tolist()])
            nbytes = self._out.nbytes - begin_nbytes
            if len(self._keys) == 1:
                self._kept.once_nbytes = once_nbytes + nbytes  # with what is inside, which is no more
            self._tags[new] = len(self._columns)
            self._places[new] = np.arange(len(new), dtype=np.int32)
            self._columns.append(column)
            self._keep(column, new, nbytes // len(new))
        tags = -1 if len(self._columns) == 1 else self._out.append(self._tags[self._numbers])
        places = self._out.append(self._places[self._numbers])
        return Repeated(len(self._numbers), tags, places, tuple(self._columns))

    def _keep(self, column: Column, new: np.ndarray[Any, Any], nbytes: int) -> None:
        if _weight(column) > _MOST_COLUMNS:
            return
        if self._kept.streamed or nbytes < LARGE_NBYTES:
            new = new[np.bincount(self._numbers, minlength=len(self._keys))[new] > 1]
        for number in new.tolist():
            if self._values[number] is None:  # which is the same object in every column
                continue
            kept = KeptValue(self._values[number], column, int(self._places[number]), nbytes)
            self._kept.add(self._keys[number], kept)


def _weight(column: Any) -> int:
    """How many columns are in one, itself included."""
    parts = column if isinstance(column, tuple) else ()
    return hasattr(column, "expression") + sum(_weight(part) for part in parts if isinstance(part, tuple))
