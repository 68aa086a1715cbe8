"""Stores over Parquet files that are not in memory: row groups are read when their rows are asked for."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from shmloader.errors import warn
from shmloader.file_systems import FileSystem
from shmloader.store.base import Rows, Store, row_array, row_numbers
from shmloader.store.chunks import Chunks, rows_of
from shmloader.store.columns.classes import Classes, ClassFinder
from shmloader.store.columns.kind import types_in
from shmloader.store.description import StoreDescription, describe_columns
from shmloader.store.files import FilePath, check_files, check_names, paths_of
from shmloader.store.row_groups import RowGroups, located
from shmloader.store.rows import RowStore
from shmloader.store.sealed_buffer import SharedBuffer
from shmloader.store.take import join

DEFAULT_CACHE_NBYTES = 1 << 30
_MOST_SECTIONS = 1 << 16  # of rows, in which row groups are looked up
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
        self.batches = batches
        self.address, end = min(places)[0], max(end for _, end in places)
        self.nbytes = end - self.address

    @property
    def mapping(self) -> Any:  # type: ignore[override]
        """The mapping; made when asked for, since a view keeps this object. See `SharedBuffer`."""
        return self.view


@dataclass(eq=False)
class _Part:
    """Row groups that lie in memory together, since they were read with one call.

    Attributes:
        rows: The rows of the store that are those of each row group.
        store: The rows.
        used: When some were asked for last.
    """

    rows: dict[int, range]
    store: RowStore
    used: int

    def copied(self, groups: list[int]) -> list[Any]:
        """Copies of some row groups: slices would keep the memory of all."""
        table = pa.Table.from_batches(self.store.chunks.batches)
        slices = [table.slice(self.rows[group].start, len(self.rows[group])) for group in groups]
        return [
            pa.RecordBatch.from_arrays(
                [pa.concat_arrays([one]) for one in batch.columns], schema=batch.schema
            )
            for batch in pa.concat_tables(slices).combine_chunks().to_batches()
        ]


class _GroupFinder:
    """Finds the row groups of many rows.

    Rows are divided into sections, no longer than the smallest row group: a section has rows of two row
    groups at most, and looking it up is quicker than a search.

    Args:
        starts: The first row of each row group, and the number of rows.
    """

    def __init__(self, starts: Rows) -> None:
        self._starts = starts
        least = int(np.diff(starts).min(initial=starts[-1]))
        self._shift = least.bit_length() - 1
        self._first_of: Rows | None = None  # the row group in which each section begins
        if least and starts[-1] >> self._shift < _MOST_SECTIONS:
            sections = np.arange((starts[-1] >> self._shift) + 1)
            self._first_of = self._search(sections << self._shift)

    def __call__(self, rows: Rows) -> Rows:
        """The number of the row group of each of some rows."""
        if self._first_of is None:
            return self._search(rows)
        found = self._first_of.take(rows >> self._shift)
        found += rows >= self._starts.take(found + 1)
        return found

    def _search(self, rows: Rows) -> Rows:
        return self._starts.searchsorted(rows, "right") - 1


class _Window(NamedTuple):
    """Row groups whose rows are gathered with one call."""

    known: frozenset[int]  # numbers of the row groups
    shifts: Rows  # from a row's number in the files to that in the store, for each row group of all
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
        self._starts = np.array(groups.starts, np.int64)
        self._group_of = _GroupFinder(self._starts)
        self._cache: dict[int, _Part] = {}  # by row group
        self._clock = itertools.count()
        self._window: _Window | None = None
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
        part = self._cache.get(group) or self._parts_with([group])[0]
        self._rows_given += 1
        return part.store.row(index - self._groups.starts[group] + part.rows[group].start)

    def __getitems__(self, indices: Any) -> list[Any]:
        numbers = np.array(row_numbers(indices, len(self)), np.int64)
        found: list[Any] = [None] * len(numbers)
        group_of = self._group_of(numbers)
        for portion in self._portions(np.unique(group_of).tolist()):
            places = np.flatnonzero(np.isin(group_of, portion))
            window = self._window_with(portion)
            rows = window.store.__getitems__(numbers[places] + window.shifts[group_of[places]])
            for place, row in zip(places.tolist(), rows, strict=True):
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
        window = self._window_with(groups)
        self._rows_given += len(rows)
        return window.store.take(rows + window.shifts.take(group_of), out)

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

    def _window_with(self, groups: list[int]) -> _Window:
        """A window that has some row groups, which are read where they are not in the cache."""
        window, now = self._window, next(self._clock)
        if window is None or not window.known.issuperset(groups):
            window = self._window = self._together(self._parts_with(groups))
        for group in groups:
            if (part := self._cache.get(group)) is not None:
                part.used = now
        return window

    def _together(self, parts: list[_Part]) -> _Window:
        """A window over some parts, and over as many others that were used last, if they are several."""
        if len(parts) > 1:
            latest = sorted(set(self._cache.values()), key=lambda part: part.used, reverse=True)
            parts = list(dict.fromkeys([*parts, *latest[: len(parts)]]))
        shifts, first = np.zeros(len(self._groups), np.int64), 0
        for part in parts:
            for group, rows in part.rows.items():
                shifts[group] = first + rows.start - self._groups.starts[group]
            first += len(part.store)
        known = frozenset(group for part in parts for group in part.rows)
        if len(parts) == 1:
            return _Window(known, shifts, parts[0].store)
        batches = [batch for part in parts for batch in part.store.chunks.batches]
        sources = [source for part in parts for source in part.store.chunks.sources]
        return _Window(known, shifts, self._store_of(batches, sources))

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
        rows, end = {}, 0
        for group in groups:
            begin, end = end, end + self._groups.starts[group + 1] - self._groups.starts[group]
            rows[group] = range(begin, end)
        store = self._store_of(batches, [self._groups.name(groups)] * len(batches))
        part = _Part(rows, store, next(self._clock))
        self._cache |= dict.fromkeys(groups, part)
        return part

    def _make_room(self, nbytes: float, needed: list[int]) -> dict[int, _Part]:
        """Drop the parts that were used longest ago; returns copies of the needed row groups in them."""
        parts = sorted(set(self._cache.values()), key=lambda part: part.used)
        kept_nbytes = sum(part.store.nbytes for part in parts)
        copies: dict[int, _Part] = {}
        for part in parts:
            still = [group for group in part.rows if group in needed]
            if kept_nbytes + nbytes <= self.cache_nbytes or len(still) == len(part.rows):
                continue
            self._window = None  # it keeps its parts
            for group in part.rows:
                self._cache.pop(group, None)
            kept_nbytes -= part.store.nbytes
            if still:
                copy = self._keep(still, part.copied(still))
                kept_nbytes += copy.store.nbytes
                copies |= dict.fromkeys(still, copy)
        return copies

    def _store_of(self, batches: list[Any], sources: list[str]) -> RowStore:
        memory, nbytes = _Span(batches), sum(batch.get_total_buffer_size() for batch in batches)
        parts: list[tuple[SharedBuffer, Any]] = [(memory, batch) for batch in batches]
        chunks = Chunks(parts, memory, nbytes, self._finder.found, (), pickles=self._pickles, sources=sources)
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
