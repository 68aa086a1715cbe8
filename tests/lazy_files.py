"""Parquet files of several row groups, and the rows that are written to them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from store_samples import Person, Point

from shmloader import share

MIXED: list[Any] = [
    {
        "path": f"image {n}",
        "label": n,
        "at": Point(n, n / 2),
        "who": Person("x" * n, n),
        "array": np.arange(n % 5),
        "tensor": torch.full((2, 2), n),
        "boxes": [[n / 2, 2.5]] * (n % 3),
        **({"extra": None} if n % 2 else {}),
    }
    for n in range(90)
]
PLAIN: list[Any] = [
    {"n": n, "x": n / 3, "text": str(n), "flag": n % 3 == 0, "some": None if n % 7 else n} for n in range(90)
]


def write(folder: Path, rows: list[Any], files: int = 3, rows_at_once: int = 8) -> list[Path]:
    """Some files with row groups of so many rows."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number}.parquet" for number in range(files)]
    table = share(rows).to_arrow()
    metadata = {b"shmloader": json.dumps({"version": 1, "rows": "table"}).encode()}
    for number, path in enumerate(paths):
        some = table.slice(number * len(rows) // files, len(rows) // files)
        pq.write_table(some.replace_schema_metadata(metadata), path, row_group_size=rows_at_once)
    return paths


def write_columns(path: Path, rows: int, rows_at_once: int, columns: int = 20) -> Path:
    numbers = {f"c{n}": np.arange(rows) + n for n in range(columns)}
    pq.write_table(pa.table(numbers), path, row_group_size=rows_at_once)
    return path


def damage(path: Path, group: int) -> None:
    """Overwrite the first page of a row group's first column."""
    with pq.ParquetFile(path) as parquet:
        column = parquet.metadata.row_group(group).column(0)
        place = min(filter(None, (column.data_page_offset, column.dictionary_page_offset)))
    data = bytearray(path.read_bytes())
    data[place : place + 20] = b"\xff" * 20
    path.write_bytes(data)


def as_text(value: Any) -> str:
    return repr(value)


def allocated_nbytes(before_nbytes: int, most_nbytes: float) -> int:
    """What Arrow holds beyond ``before_nbytes``, once threads of Arrow's have let go of what they read.

    It waits for no more than ``most_nbytes``, and for 10 s: a busy machine may be late with such a thread.
    """
    deadline, nbytes = time.monotonic() + 10, pa.total_allocated_bytes() - before_nbytes
    while nbytes > most_nbytes and time.monotonic() < deadline:
        time.sleep(0.01)
        nbytes = pa.total_allocated_bytes() - before_nbytes
    return nbytes
