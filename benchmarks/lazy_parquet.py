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
from collections.abc import Callable
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


def processor_s() -> float:
    """Processor time of this process and its workers so far."""
    family = [psutil.Process(), *psutil.Process().children()]
    return sum(sum(one.cpu_times()[:2]) for one in family)


def rates(read: Callable[[], int]) -> tuple[float, float]:
    """Rows a second, and rows for each second of a processor."""
    began_s, processor_began_s = time.perf_counter(), processor_s()
    rows = read()
    return rows / (time.perf_counter() - began_s), rows / (processor_s() - processor_began_s)


def scanned(path: Path) -> int:
    return sum(map(len, pyarrow.dataset.dataset(path).to_batches()))


def loaded(loader: Any) -> int:
    return sum(len(batch["c0"]) for batch in loader)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=whole_number(_ROWS_OF_GROUP), default=2_000_000, help="(%(default)s)")
    parser.add_argument("--workers", type=whole_number(1), default=2, help="(%(default)s)")
    parser.add_argument("--turns", type=whole_number(1), default=3, help="(%(default)s)")
    given = parser.parse_args()
    head = "batch|Arrow's scan, rows/s|loader, rows/s|loader/scan|by processor time|a worker's memory"
    table = [head.split("|")]
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
            turns = []
            for _ in range(given.turns):
                scan, own = rates(lambda: scanned(path)), rates(lambda: loaded(loader))  # noqa: B023
                turns.append((scan[0], own[0], own[0] / scan[0], own[1] / scan[1]))
            worker_nbytes = max(one.memory_full_info().uss for one in psutil.Process().children())
            loader.close()
            scan_rate, rate, ratio, by_processor = map(statistics.median, zip(*turns, strict=True))
            texts = [f"{batch_size:,}", f"{scan_rate:,.0f}", f"{rate:,.0f}", f"{ratio:.2f}"]
            table.append([*texts, f"{by_processor:.2f}", f"{worker_nbytes / 2**20:,.0f} MiB"])
        data, kept = store.nbytes / 2**20, store.cache_nbytes / 2**20
        print(f"{len(store):,} rows of {data:,.0f} MiB; each worker keeps {kept:,.0f} MiB of them")
    print(render_table(table, texts=1))


if __name__ == "__main__":
    main()
