"""Values that several rows share: each is kept once, and every row has its place.

Rows often refer to one and the same object: a vocabulary in each record, the array of a clip in each of its
frames. Encoded row by row, the store would hold it once per row. What is the same object is found by ``id``,
within a chunk, and for what has repeated (or is large) across chunks too: a column is only offsets into the
memory, so a later chunk can refer to an earlier one's.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.columns import Column, Scope, items
from shmloader.store.kept import (
    LARGE_NBYTES,
    LEAST_NBYTES,
    MOST_COLUMNS,
    FoundInColumn,
    Ids,
    Kept,
    KeptValue,
    ids_of,
    weight_of,
)
from shmloader.store.size import mean_stored_nbytes
from shmloader.store.unions import MOST_KINDS

_PLACE_NBYTES = 4
_DESCRIBED_NBYTES = 40  # of a column in the pickle of each chunk that refers to it
_SAMPLED = 256
_SAMPLED_KEYS = 64
_ID_OF_NONE = id(None)


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


def encode_repeats(
    kind: type,
    values: list[Any],
    encode: Callable[[list[Any]], Column],
    kept: Kept,
    out: BufferBuilder,
    *,
    look_at_all: bool,
    are_held: bool = True,
) -> Column:
    """Encode values, each object once.

    Args:
        kind: Their type; None may be among them.
        values: Objects that are alive until all is encoded, or are not made for this call alone.
        encode: Encodes those that are not in memory yet.
        kept: What is.
        out: Where to.
        look_at_all: Whether to compare all values, or only if a sample of them is worth it.
        are_held: Whether the values are what the caller has given, so that others may refer to them too.

    Returns:
        A `Repeated` column; what ``encode`` returned where that is not larger.
    """

    def encode_remembered(values: list[Any]) -> Column:
        begin_nbytes = out.nbytes
        column = encode(values)
        if are_held:
            kept.remember(kind, values, column, out.nbytes - begin_nbytes)
        return column

    if not look_at_all:
        samples = _samples(values, _SAMPLED)
        if not any(_are_likely_objects(kind, ids_of(sample), kept) for sample in samples):
            return encode_remembered(values)
    elif _most_references(values) <= _HELD_ONCE:  # quicker than to compare, and mostly so
        return _encode_new(values, id, encode_remembered, kept)
    if not _are_likely_objects(kind, ids_of(values), kept):
        return _encode_new(values, id, encode_remembered, kept)
    return _encode_by_key(list(map(id, values)), values, encode_remembered, kept, out, kind)


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


def _most_references(values: list[Any]) -> int:
    return max(map(sys.getrefcount, values))


def _references_if_held_once() -> int:
    """What `_most_references` gives where each value has but one holder beside the list itself.

    Then none is there twice, since each place would hold it too, and none is kept, which holds it as well.
    """
    holder: list[list[Any]] = [[]]
    return _most_references(list(holder))


_HELD_ONCE = _references_if_held_once()


def _are_likely_objects(kind: type, ids: Ids, kept: Kept) -> bool:
    """Whether any of some objects, but None, is there twice, or kept."""
    ids = np.sort(ids[ids != _ID_OF_NONE])
    return bool((ids[1:] == ids[:-1]).any()) or (len(ids) > 0 and kept.has_any_id(kind, ids))


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
    if nbytes >= LARGE_NBYTES and weight_of(column) <= MOST_COLUMNS:
        for row, value in enumerate(values):
            kept.add(key_of(value), KeptValue(value, column, row, nbytes))
    return column


def _encode_by_key(
    keys: list[Any],
    values: list[Any],
    encode: Callable[[list[Any]], Column],
    kept: Kept,
    out: BufferBuilder,
    kind: type | None = None,
) -> Column:
    """Encode values, those with the same key once, if that is worth it; with a kind, keys are ids."""
    row_of = dict(zip(keys, range(len(keys)), strict=True))
    known: dict[Any, KeptValue] = {}
    if kept:
        found = ((key, kept.get(key, values[row])) for key, row in row_of.items())
        known = {key: one for key, one in found if one is not None}
    written: list[FoundInColumn] = []
    if kind is not None:
        written = kept.in_earlier_columns(kind, np.fromiter(row_of, np.int64, len(row_of)))
    again = [values[row] for row, key in enumerate(keys) if row_of[key] != row]  # row_of has a key's last row
    mean_nbytes = _mean_nbytes(again)
    spared_nbytes = len(again) * mean_nbytes + sum(one.nbytes for one in known.values())
    spared_nbytes += sum(one.column.nbytes * len(one.which) for one in written)
    columns = [*{id(one.column): one.column for one in known.values()}.values()]
    columns += [one.column.column for one in written]
    if mean_nbytes < LEAST_NBYTES and not columns:
        return encode(values)
    if spared_nbytes < 2 * _PLACE_NBYTES * len(keys) + _DESCRIBED_NBYTES * sum(map(weight_of, columns)):
        return encode(values)
    return _Encoding(keys, values, row_of, kept, out).finish(encode, known, written)


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
        kept: Kept,
        out: BufferBuilder,
    ) -> None:
        self._number_of = {key: number for number, key in enumerate(row_of)}
        self._numbers = np.fromiter(map(self._number_of.__getitem__, keys), np.int32, len(keys))
        self._keys = list(row_of)
        self._values = [values[row] for row in row_of.values()]
        self._tags = np.full(len(row_of), -1, np.int8)
        self._places = np.zeros(len(row_of), np.int32)
        self._columns: list[Column] = []
        self._kept, self._out = kept, out

    def _refer_to(self, known: dict[Any, KeptValue]) -> None:
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
            self._kept.refer_to(key)
            self._tags[self._number_of[key]] = tag
            self._places[self._number_of[key]] = kept.place

    def _refer_to_columns(self, written: list[FoundInColumn]) -> None:
        for found in written[: MOST_KINDS - 1 - len(self._columns)]:
            self._kept.refers_back = True
            mine = self._tags[found.which] < 0
            self._tags[found.which[mine]] = len(self._columns)
            self._places[found.which[mine]] = found.places[mine]
            self._columns.append(found.column.column)

    def finish(
        self,
        encode: Callable[[list[Any]], Column],
        known: dict[Any, KeptValue],
        written: list[FoundInColumn],
    ) -> Column:
        self._refer_to(known)
        self._refer_to_columns(written)
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
        if weight_of(column) > MOST_COLUMNS:
            return
        if self._kept.streamed or nbytes < LARGE_NBYTES:
            new = new[np.bincount(self._numbers, minlength=len(self._keys))[new] > 1]
        for number in new.tolist():
            if self._values[number] is None:  # which is the same object in every column
                continue
            kept = KeptValue(self._values[number], column, int(self._places[number]), nbytes)
            self._kept.add(self._keys[number], kept)
