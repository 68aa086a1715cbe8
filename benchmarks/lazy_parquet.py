"""Parquet files that are read lazily, block-shuffled, beside Arrow's own scan in the files' order.

``python -m benchmarks.lazy_parquet`` writes numbers in 20 columns, and reads them in turn: by Arrow's scanner
with all cores, which gives what it has read to nobody, and by the loader with workers that stay. It prints
medians, of the ratios within each turn, too, and the most memory of a worker. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from benchmarks.options import whole_number
from benchmarks.tables import render_table
from shmloader import BlockSampler, DataLoader
from shmloader.store import open_store

_COLUMNS, _ROWS_OF_GROUP, _WINDOW = 20, 20_000, 6
_BATCHES = (256, 2048, 16_384)


def write(path: Path, rows: int) -> None:
    """Half of the columns are random floats, and half small whole numbers."""
    chance, writer = np.random.default_rng(0), None
    for _ in range(rows // _ROWS_OF_GROUP):
        columns = {
            f"c{number}": chance.standard_normal(_ROWS_OF_GROUP)
            if number % 2
            else chance.integers(0, 1000, _ROWS_OF_GROUP)
            for number in range(_COLUMNS)
        }
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=_ROWS_OF_GROUP)
    if writer is not None:
        writer.close()


def scanned(path: Path) -> float:
    """Rows a second of Arrow's scanner."""
    began_s = time.perf_counter()
    rows = sum(map(len, pyarrow.dataset.dataset(path).to_batches()))
    return rows / (time.perf_counter() - began_s)


def loaded(loader: Any) -> tuple[float, int]:
    """Rows a second of a loader, and at the end the most memory of a worker that is not shared, in bytes."""
    began_s, rows = time.perf_counter(), 0
    for batch in loader:
        rows += len(batch["c0"])
    took_s = time.perf_counter() - began_s
    return rows / took_s, max(one.memory_full_info().uss for one in psutil.Process().children())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=whole_number(_ROWS_OF_GROUP), default=2_000_000, help="(%(default)s)")
    parser.add_argument("--workers", type=whole_number(1), default=2, help="(%(default)s)")
    parser.add_argument("--turns", type=whole_number(1), default=3, help="(%(default)s)")
    given = parser.parse_args()
    table = [["batch", "Arrow's scan, rows/s", "loader, rows/s", "loader/scan", "a worker's memory"]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.parquet"
        write(path, given.rows)
        group_nbytes = _ROWS_OF_GROUP * _COLUMNS * 8
        store = open_store(path, lazy=True, cache_nbytes=(_WINDOW + 2) * group_nbytes)
        for batch_size in _BATCHES:
            lanes, run = given.workers, batch_size
            sampler = BlockSampler(store, 1, 0, window=_WINDOW, lanes=lanes, run_length=run)
            loader = DataLoader(
                store, batch_size, sampler=sampler, num_workers=given.workers, persistent_workers=True
            )
            loaded(loader)  # its workers start
            turns = [(scanned(path), *loaded(loader)) for _ in range(given.turns)]
            loader.close()
            scan, rate, ratio = (
                statistics.median(map(of, turns))
                for of in (lambda turn: turn[0], lambda turn: turn[1], lambda turn: turn[1] / turn[0])
            )
            most_mib = max(turn[2] for turn in turns) / 2**20
            row = [f"{batch_size:,}", f"{scan:,.0f}", f"{rate:,.0f}", f"{ratio:.2f}", f"{most_mib:,.0f} MiB"]
            table.append(row)
        data, kept = store.nbytes / 2**20, store.cache_nbytes / 2**20
        print(f"{len(store):,} rows of {data:,.0f} MiB; each worker keeps {kept:,.0f} MiB of them")
    print(render_table(table, texts=1))


if __name__ == "__main__":
    main()
