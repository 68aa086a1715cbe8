"""Row groups that are read with one call: how many, what is dropped, and what is copied to be kept."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lazy_files import MIXED, allocated_nbytes, as_text, damage, write, write_columns

import shmloader
from shmloader import BlockSampler, DataLoader, share
from shmloader.memory.limits import Cores
from shmloader.store.ranges import RangeFinder
from shmloader.store.row_groups import RowGroups

GROUP_NBYTES = 160_000


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The row groups of each call of Arrow's reader, in this process."""
    read, noted = pq.ParquetFile.read_row_groups, []

    def noting(self: Any, groups: list[int], **given: Any) -> Any:
        noted.append(groups)
        return read(self, groups, **given)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", noting)
    return noted


def with_cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr("shmloader.store.row_groups.cores", lambda: Cores(number, number, None))


@pytest.mark.parametrize(("cores", "sizes"), [(1, [6]), (2, [3, 3]), (4, [2, 2, 2]), (64, [1] * 6)])
def test_local_row_groups_are_read_in_as_many_parts_as_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[list[int]], cores: int, sizes: list[int]
) -> None:
    lazy: Any = shmloader.open(write_columns(tmp_path / "a.parquet", 1000, 100), lazy=True)
    with_cores(monkeypatch, cores)
    assert lazy.take(range(250, 800))["c3"].tolist() == list(range(253, 803))
    assert sorted(calls) == sorted([list(range(2, 8))[at : at + sizes[0]] for at in range(0, 6, sizes[0])])


def test_a_part_lies_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[list[int]]
) -> None:
    with_cores(monkeypatch, 1)
    for name in "abc":
        write_columns(tmp_path / f"{name}.parquet", 300, 100)
    lazy: Any = shmloader.open(tmp_path / "*.parquet", lazy=True)
    assert lazy.take(range(150, 750))["c0"].tolist() == [row % 300 for row in range(150, 750)]
    assert sorted(calls) == [[0, 1], [0, 1, 2], [1, 2]]


def parts_read(monkeypatch: pytest.MonkeyPatch, log: Path) -> Callable[[], set[str]]:
    read = RowGroups.read

    def noted(self: RowGroups, groups: Any) -> Any:
        found = read(self, groups)
        with log.open("a") as file:
            file.write(f"{len(found)} {len(groups)}\n")
        return found

    monkeypatch.setattr(RowGroups, "read", noted)
    return lambda: set(log.read_text().splitlines())


def test_workers_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 4)
    parts = parts_read(monkeypatch, tmp_path / "log")
    lazy: Any = shmloader.open(write_columns(tmp_path / "a.parquet", 800, 100), lazy=True)
    loader = DataLoader(
        lazy, batch_sampler=[range(1, 600), range(2, 600)], num_workers=2, multiprocessing_context="fork"
    )
    assert [len(batch["c0"]) for batch in loader] == [599, 598]
    assert parts() == {"2 6"}


def test_a_damaged_row_group_is_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 1)
    path = write_columns(tmp_path / "a.parquet", 100, 10, columns=1)
    damage(path, 3)
    with pytest.raises(ValueError, match=r"a\.parquet, row group 3 is damaged"):
        shmloader.open(path, lazy=True).take(range(100))


class Forgetful(dict[int, Any]):
    """Footers of which another thread drops all as soon as one is noted."""

    def __init__(self, groups: Any) -> None:
        self.groups = groups

    def __setitem__(self, file: int, footer: Any) -> None:
        self.groups._footers = Forgetful(self.groups)


def test_footers_that_another_thread_drops_are_read_again(tmp_path: Path) -> None:
    lazy: Any = shmloader.open(write_columns(tmp_path / "a.parquet", 100, 10), lazy=True)
    lazy._groups._footers = Forgetful(lazy._groups)
    assert lazy.take(range(20, 70))["c1"].tolist() == list(range(21, 71))


def test_what_is_kept_of_a_part_is_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[list[int]]
) -> None:
    """Each window needs the last row group of the one before, and has no room for the others."""
    with_cores(monkeypatch, 1)
    lazy: Any = shmloader.open(
        write_columns(tmp_path / "a.parquet", 80_000, 1000), lazy=True, cache_nbytes=8 * GROUP_NBYTES
    )
    gc.collect()
    before_nbytes, most_nbytes = pa.total_allocated_bytes(), 0
    for begin in range(0, 74_000, 6000):
        rows = np.arange(begin, begin + 7000, 3)
        assert (lazy.take(rows)["c7"] == rows + 7).all()
        assert lazy[begin]["c1"] == begin + 1
        most_nbytes = max(most_nbytes, allocated_nbytes(before_nbytes, 8.5 * GROUP_NBYTES))
    assert list(itertools.chain(*calls)) == list(range(79))
    assert 7 * GROUP_NBYTES <= most_nbytes <= 8.5 * GROUP_NBYTES


@pytest.mark.parametrize("cores", [1, 3])
def test_rows_of_all_kinds_are_right_whatever_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    with_cores(monkeypatch, cores)
    write(tmp_path / "a", MIXED)
    store, dice = share(MIXED), random.Random(cores)
    for cache_nbytes in range(1000, 40_000, 3000):
        lazy: Any = shmloader.open(tmp_path / "a", lazy=True, cache_nbytes=cache_nbytes)
        for _ in range(4):
            begin = dice.randrange(80)
            rows = dice.sample(range(begin, 90), dice.randint(1, 90 - begin))
            assert as_text(lazy.take(rows)) == as_text(store.take(rows))
            assert as_text(lazy.__getitems__(rows)) == as_text(store.__getitems__(rows))
            assert as_text(lazy[begin]) == as_text(MIXED[begin])


def test_a_window_of_a_worker_is_read_with_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)
    parts = parts_read(monkeypatch, tmp_path / "log")
    lazy: Any = shmloader.open(
        write_columns(tmp_path / "a.parquet", 4800, 100), lazy=True, cache_nbytes=8 * 16_000
    )
    sampler = BlockSampler(lazy, 1, 0, window=6, lanes=2, run_length=50)
    loader = DataLoader(lazy, 50, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    assert sum(len(batch["c0"]) for batch in loader) == 4800
    assert parts() == {"1 6"}


def test_rows_of_a_selection_are_read_one_by_one(tmp_path: Path, calls: list[list[int]]) -> None:
    lazy: Any = shmloader.open(write_columns(tmp_path / "a.parquet", 1000, 10), lazy=True)
    for view in (lazy.select(np.arange(0, 1000, 7)), lazy[:1000]):
        assert [view[0]["c0"] for _ in range(4)] == [0] * 4
    assert calls == [[0]]


@pytest.mark.parametrize("seed", range(40))
def test_ranges_are_found_as_by_a_search(seed: int) -> None:
    dice = np.random.default_rng(seed)
    least, factor = dice.integers(0, 2), 1 << dice.integers(0, 12)
    sizes = dice.integers(least, 1 + dice.integers(1, 400), dice.integers(1, 60)) * factor
    starts = [0, *np.cumsum(sizes).tolist()]
    rows = dice.integers(0, max(starts[-1], 1), 500)
    edges = np.array(
        [row for row in {*starts, *(start - 1 for start in starts)} if 0 <= row < starts[-1]], np.int64
    )
    for some in (rows, edges, rows[:0]) if starts[-1] else (rows[:0],):
        assert RangeFinder(starts)(some).tolist() == (np.searchsorted(starts, some, "right") - 1).tolist()
