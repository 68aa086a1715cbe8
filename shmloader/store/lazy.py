"""Stores over Parquet files that are not in memory: row groups are read when their rows are asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from shmloader.errors import warn
from shmloader.file_systems import FileSystem
from shmloader.store.base import Store, row_array
from shmloader.store.chunks import Chunks, rows_of
from shmloader.store.columns.classes import Classes, ClassFinder
from shmloader.store.columns.kind import types_in
from shmloader.store.description import StoreDescription, describe_columns
from shmloader.store.files import FilePath, check_files, check_names, paths_of
from shmloader.store.ranges import RangeFinder, Rows
from shmloader.store.row_groups import RowGroups, located
from shmloader.store.rows import RowStore
from shmloader.store.sealed_buffer import SharedBuffer
from shmloader.store.take import join

DEFAULT_CACHE_NBYTES = 1 << 30
_MANY_READS = 64
_WASTE = 8  # rows read for each that was asked for, from which on that is told


def open_lazily(
    path: FilePath | Sequence[FilePath],
    columns: Sequence[str] | None,
    allow_pickle: bool,
    cache_nbytes: int | None,
    filesystem: Any,
    verify: bool | None,
) -> LazyStore:
    """Open Parquet files as a lazy store; see `shmloader.store.open_store`."""
    check_names(columns)
    cache_nbytes = DEFAULT_CACHE_NBYTES if cache_nbytes is None else cache_nbytes
    if cache_nbytes < 1:
        raise ValueError(f"cache_nbytes={cache_nbytes:,} must be at least 1")
    paths = paths_of(path)
    given = None if filesystem is None else FileSystem(filesystem)
    places = [located(one, given) for one in paths]
    used, _ = places[0]
    for one, (other, _) in zip(paths, places, strict=True):
        if not other.opened.equals(used.opened):
            raise ValueError(f"{one} lies in another file system than {paths[0]}: open them apart")
    found = [file for _, files in places for file in files]
    if verify:
        if not used.is_local:
            raise ValueError("verify=True reads whole files, and these are not local: leave it out")
        check_files(found, verify)
    groups = RowGroups(found, used, columns, allow_pickle)
    if groups.form["rows"] not in ("table", "column"):
        raise ValueError(
            f"{found[0]} holds a {groups.form['rows']}, whose keys are looked up in memory: open it without "
            "lazy=True"
        )
    return LazyStore(groups, cache_nbytes, allow_pickle, {})


class _Span(SharedBuffer):
    """The addresses from the first to the last buffer of some batches in this process's own memory.

    What lies between the buffers is not read: offsets were checked when the batches were read.
    """

    __slots__ = ("batches",)

    def __init__(self, batches: list[Any]) -> None:
        buffers = [one for batch in batches for column in batch.columns for one in column.buffers() if one]
        places = [(one.address, one.address + one.size) for one in buffers if one.size] or [(0, 0)]
        self.batches, self.mapping = batches, None
        self.address, end = min(places)[0], max(end for _, end in places)
        self.nbytes = end - self.address


@dataclass(frozen=True, eq=False)
class _Part:
    """Row groups that lie in memory together: they were read with one call, or are gathered from with one."""

    shifts: dict[int, int]  # from a row's number in the files to that in the store, by row group
    store: RowStore


class LazyStore(Store):
    """Rows of Parquet files, of which each process keeps the row groups that it has used last.

    A row group is read as a whole when one of its rows is asked for, and dropped when the cache has no room.
    So rows that are read one after another should lie in few row groups: `shmloader.BlockSampler` sees to it.
    Views of rows that the program keeps (arrays) keep their row groups.

    Attributes:
        blocks: The first row of each row group that has rows, for `BlockSampler`.
        cache_nbytes: Bytes of row groups that a process keeps. A single one that is larger is kept alone.
    """

    def __init__(self, groups: RowGroups, cache_nbytes: int, pickles: bool, classes: Classes) -> None:
        self.blocks = np.unique(np.array(groups.starts[:-1], np.int64))
        self.blocks = self.blocks[self.blocks < groups.starts[-1]]
        self.cache_nbytes = cache_nbytes
        self._groups, self._pickles, self._finder = groups, pickles, ClassFinder(classes)
        self._group_of = RangeFinder(groups.starts)
        self._cache: dict[int, _Part] = {}  # by row group, in the order of their last uses
        self._window: _Part | None = None  # that was gathered from last
        self._share = 0.0  # bytes in memory for each byte of a footer's account, at most so far
        self._reads, self._rows_read, self._rows_given = 0, 0, 0
        self._has_told = False

    def __len__(self) -> int:
        return self._groups.starts[-1]

    def __reduce__(self) -> Any:
        self._finder.find_all(kind for one in self._groups.schema for kind in types_in(one.type))
        return LazyStore, (self._groups, self.cache_nbytes, self._pickles, self._finder.given())

    def row(self, index: int) -> Any:
        """One row, by its number; reads its row group."""
        group = bisect_right(self._groups.starts, index) - 1
        part = self._cache.pop(group, None) or self._parts_with([group])[0]
        self._cache[group] = part  # behind those that were used before
        self._rows_given += 1
        return part.store.row(index + part.shifts[group])

    def __getitems__(self, indices: Any) -> list[Any]:
        numbers = row_array(indices, len(self))
        if not len(numbers):
            return []
        found: list[Any] = [None] * len(numbers)
        group_of = self._group_of(numbers)
        for portion in self._portions(np.unique(group_of).tolist()):
            places = np.flatnonzero(np.isin(group_of, portion))
            store, rows = self._window_with(portion, numbers[places], group_of[places])
            for place, row in zip(places.tolist(), store.__getitems__(rows), strict=True):
                found[place] = row
        self._rows_given += len(numbers)
        return found

    def take(self, indices: Any, out: Any = None) -> Any:
        """Some rows, gathered by columns where all their row groups fit in the cache."""
        rows = row_array(indices, len(self))
        if not len(self):
            return [] if out is None else out
        group_of = self._group_of(rows)
        groups = np.flatnonzero(np.bincount(group_of)).tolist()  # far quicker than np.unique
        groups = groups or self._group_of(np.zeros(1, np.int64)).tolist()
        if len(self._portions(groups)) > 1:
            return join(self.__getitems__(rows), out)
        self._rows_given += len(rows)
        store, rows = self._window_with(groups, rows, group_of)
        return store.take(rows, out)

    def column(self, name: str | int) -> NoReturn:
        """A lazy store has no columns apart: choose them as it is opened."""
        raise TypeError(f"a field of rows that are read lazily is chosen by columns=[{name!r}] of open()")

    def to_arrow(self) -> NoReturn:
        """A lazy store is not in memory."""
        raise TypeError("the rows are read lazily, and may not fit in memory: use pyarrow.dataset for all")

    def describe(self) -> StoreDescription:
        """The rows and bytes of the files before compression; the fields' bytes are unknown, and 0."""
        empty = [pa.nulls(0, field.type) for field in self._groups.schema]
        rows = rows_of(pa.RecordBatch.from_arrays(empty, schema=self._groups.schema))
        kind, fields = describe_columns([rows], lambda _: pa.null())
        return StoreDescription(kind, len(self), sum(self._groups.nbytes), 0, fields)

    # --- row groups in memory

    def _portions(self, groups: list[int]) -> list[list[int]]:
        """Row groups in portions that fit in the cache."""
        if len(groups) == 1 or all(group in self._cache for group in groups):
            return [groups]
        portions: list[list[int]] = []
        left = 0.0
        for group in groups:
            nbytes = self._expected_nbytes(group)
            if not portions or nbytes > left:
                portions.append([])
                left = self.cache_nbytes
            portions[-1].append(group)
            left -= nbytes
        return portions

    def _expected_nbytes(self, group: int) -> float:
        return self._groups.nbytes[group] * (self._share or 1)

    def _window_with(self, groups: list[int], rows: Rows, group_of: Rows) -> tuple[RowStore, Rows]:
        """A store that has some row groups, and the numbers there of some rows of them."""
        window = self._window
        if window is None or not window.shifts.keys() >= set(groups):
            window = self._window = self._together(self._parts_with(groups))
        for group in groups:
            if (part := self._cache.pop(group, None)) is not None:
                self._cache[group] = part
        shifts = np.zeros(groups[-1] + 1, np.int64)
        shifts[groups] = [window.shifts[group] for group in groups]
        return window.store, rows + shifts.take(group_of)

    def _together(self, parts: list[_Part]) -> _Part:
        """One part of some, and of as many others that were used last if they are several."""
        if len(parts) == 1:
            return parts[0]
        shifts: dict[int, int] = {}
        batches: list[Any] = []
        sources: list[str] = []
        for part in dict.fromkeys([*parts, *self._latest_parts()[: len(parts)]]):
            begin = sum(map(len, batches))
            shifts |= {group: begin + shift for group, shift in part.shifts.items()}
            batches += part.store.chunks.batches
            sources += part.store.chunks.sources
        return _Part(shifts, self._store_of(batches, sources))

    def _parts_with(self, groups: list[int]) -> list[_Part]:
        """The parts that have some row groups, which are read where they are not in the cache."""
        found = {group: self._cache.get(group) for group in groups}
        missing = [group for group, part in found.items() if part is None]
        if missing:
            found |= self._make_room(sum(map(self._expected_nbytes, missing)), groups)
            for some, batches in self._groups.read(missing):
                part = self._keep(some, batches)
                found |= dict.fromkeys(some, part)
                footers_nbytes = sum(self._groups.nbytes[group] for group in some)
                self._share = max(self._share, part.store.nbytes / max(1, footers_nbytes))
                self._rows_read += len(part.store)
            self._reads += len(missing)
            self._tell_of_waste()
        return list(dict.fromkeys(filter(None, found.values())))

    def _keep(self, groups: list[int], batches: list[Any]) -> _Part:
        store = self._store_of(batches, [self._groups.name(groups)] * len(batches))
        part, begin = _Part({}, store), 0
        for group in groups:
            rows = self._groups.rows(group)
            part.shifts[group] = begin - rows.start
            begin += len(rows)
            self._cache[group] = part
        return part

    def _make_room(self, nbytes: float, needed: list[int]) -> dict[int, _Part]:
        """Drop the parts that were used longest ago; returns copies of the needed row groups in them."""
        parts = self._latest_parts()
        nbytes += sum(part.store.nbytes for part in parts)
        copies: dict[int, _Part] = {}
        for part in reversed(parts):
            still = [group for group in part.shifts if group in needed]
            if nbytes <= self.cache_nbytes or len(still) == len(part.shifts):
                continue
            self._window = None  # it keeps its parts
            for group in part.shifts:
                self._cache.pop(group, None)
            nbytes -= part.store.nbytes
            if still:
                copy = self._keep(still, self._copied(part, still))
                nbytes += copy.store.nbytes
                copies |= dict.fromkeys(still, copy)
        return copies

    def _copied(self, part: _Part, groups: list[int]) -> list[Any]:
        """Copies of some row groups of a part: slices would keep the memory of all."""
        table = pa.Table.from_batches(part.store.chunks.batches)
        rows = map(self._groups.rows, groups)
        slices = [
            table.slice(one.start + part.shifts[group], len(one))
            for group, one in zip(groups, rows, strict=True)
        ]
        return [
            pa.RecordBatch.from_arrays(
                [pa.concat_arrays([column]) for column in batch.columns], schema=batch.schema
            )
            for batch in pa.concat_tables(slices).to_batches()
        ]

    def _latest_parts(self) -> list[_Part]:
        """The parts in the cache; those that were used last come first."""
        return list(dict.fromkeys(reversed(self._cache.copy().values())))  # of threads one may change it

    def _store_of(self, batches: list[Any], sources: list[str]) -> RowStore:
        memory, nbytes = _Span(batches), sum(batch.get_total_buffer_size() for batch in batches)
        where: list[SharedBuffer] = [memory] * len(batches)
        found, pickles = self._finder.found, self._pickles
        chunks = Chunks(where, batches, nbytes, found, (), pickles=pickles, sources=sources)
        return RowStore(chunks, views=None)

    def _tell_of_waste(self) -> None:
        if self._has_told or self._reads < _MANY_READS or self._rows_read < _WASTE * self._rows_given:
            return
        self._has_told = True
        warn(
            f"{self._reads:,} row groups of {self._rows_read:,} rows were read for {self._rows_given:,} rows "
            f"that were asked for, with cache_nbytes={self.cache_nbytes:,}. Use shmloader.BlockSampler, with "
            "a smaller window or as many lanes as workers, or a larger cache"
        )
