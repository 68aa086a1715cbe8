"""Sharing, saving, opening and reading import no pandas, which `pyarrow.array` would if it is installed."""

import datetime as dt
import decimal
import importlib.abc
import os
import pathlib
import subprocess
import sys
import traceback
import uuid
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from store_samples import Colour, Custom, Person, Point, Slotted
from warm_python import warm_python

import shmloader
from shmloader.store import Store
from shmloader.store.testing import identical

MANY = 100  # rows: enough for dictionaries, and for repeated objects
ZONES = [None, dt.UTC, dt.timezone(dt.timedelta(hours=5)), zoneinfo.ZoneInfo("Europe/Prague")]
REPEATED = [{"name": "dog", "hue": 0.5}, {"name": "cat", "hue": 0.25}]

ROWS: dict[str, list[Any]] = {
    "ints": [*range(MANY), -(2**40), None],
    "huge ints": [1, 2**63, None],
    "floats": [n / 2 for n in range(MANY)] + [float("nan")],
    "bools": [n % 3 == 0 for n in range(MANY)] + [None],
    "texts": [f"caption {n}" for n in range(MANY)],
    "texts beyond ASCII": [f"žluťoučký 😀 {n}" for n in range(MANY)] + [None, ""],
    "repeated texts": [f"class {n % 3}" for n in range(MANY)],
    "surrogates": ["a", "\ud800"],
    "bytes": [b"\0" * n for n in range(MANY)],
    "repeated bytes": [b"%d" % (n % 3) for n in range(MANY)],
    "nothing but None": [None] * 3,
    "dates": [dt.date(1969, 12, 31), dt.date.max, dt.date.min, None],
    "times": [dt.time(1, 2, 3, 4), dt.time.max, dt.time(fold=1)],
    **{
        f"datetimes, {zone}": [dt.datetime(1969 + n, 7, 1, 2, 3, 4, n, zone) for n in range(99)]
        for zone in ZONES
    },
    "durations": [dt.timedelta(-1, 2, 3), dt.timedelta(9**8)],
    "long durations": [dt.timedelta.max, dt.timedelta(1)],
    "decimals": [decimal.Decimal("1.50"), decimal.Decimal("-0")],
    "UUIDs": [uuid.UUID(int=1 << 120), uuid.UUID(bytes=bytes(16))],
    "paths": [pathlib.PurePosixPath(f"a/ž/{n}") for n in range(3)],
    "enums": [Colour.RED, Colour.BLUE],
    "records": [{"id": n, "score": n / 2, "good": n > 5, "name": str(n), "near": None} for n in range(MANY)],
    "optional keys": [{f"k{key}": n for key in range(9) if n >> key & 1} for n in range(MANY)],
    "very many optional keys": [{f"k{key}": key for key in range(70) if key != n} for n in range(9)],
    "empty dicts": [{}, {}],
    "dicts of any keys": [{n: "x", None: n} for n in range(5)],
    "namedtuples": [Point(1, 2.0), Point(3)],
    "dataclasses": [Person("a", 1), Person("b", 2, ["x"])],
    "dataclasses with slots": [Slotted("a", 1), Slotted("b", 2)],
    "nested lists": [[[n, 0.5], [], None] * (n % 3) for n in range(MANY)],
    "lists of one length": [[n, n + 1] for n in range(MANY)],
    "tuples": [(1, "a"), (2, "b"), (3,), ()],
    "sets": [{1, 2}, set(), frozenset("ab")],
    "ndarrays": [np.arange(6.0).reshape(2, 3)] * 3,
    "ragged ndarrays": [np.ones((n, 2), np.uint8) for n in range(5)],
    "ndarrays of dtypes that Arrow lacks": [np.array([("a", n)], "U3,>i4") for n in range(3)],
    "tensors": [torch.arange(3) + n for n in range(3)],
    "ragged tensors": [torch.ones(n, dtype=torch.bfloat16) for n in range(5)],
    "NumPy scalars": [np.float16(1.5), np.bool_(True), np.int8(-1), np.datetime64(5, "ns"), np.uint64(2**63)],
    "unions": [1, "a", 2.5, None, b"b", True, (1,), [], {"a": 1}, Colour.RED, 1 + 2j] * 9,
    "pickled objects": [Custom(np.arange(3), torch.ones(2), "x"), None, slice(1, 2)],
    "repeated objects": REPEATED * MANY,
    "kinds one after the other": [n if n < MANY else str(n) for n in range(2 * MANY)],
    "records one after the other": [
        {"a": n} if n < MANY else {"a": 2**40, "b": "x"} for n in range(2 * MANY)
    ],
    "lists one after the other": [[n] * (n % 3) if n < MANY else [2**40, n] for n in range(2 * MANY)],
    "shapes one after the other": [np.zeros((1 + n // MANY, 2)) for n in range(2 * MANY)],
}


class Finder(importlib.abc.MetaPathFinder):
    """An import finder that finds nothing, and notes where pandas is imported."""

    def __init__(self) -> None:
        self.imports: list[str] = []

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "pandas":
            self.imports += traceback.format_stack()


FINDER = Finder()


class Boxes:
    """A dataset; each sample also counts the imports of pandas in its process."""

    def __init__(self) -> None:
        self.boxes = [{"id": n, "name": f"box {n}"} for n in range(20_000)]
        self.by_id = {box["id"]: box for box in self.boxes}  # links to rows of the list
        self.by_image = {n: self.boxes[n : n + 5] for n in range(0, 20_000, 5)}

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.by_id[index], len(FINDER.imports)

    def __len__(self) -> int:
        return 8


def compare(store: Any, wanted: Any, folder: Path) -> None:
    """Read a store, and stores opened from its files."""
    stores = [store]
    for suffix in (".arrow", ".parquet"):
        path = folder / f"rows{suffix}"
        try:
            store.save(path)
        except TypeError:  # Parquet has no unions
            assert suffix == ".parquet"
        else:
            stores.append(shmloader.open(path, allow_pickle=True))
    for one in stores:
        found = dict(one) if isinstance(wanted, dict) else set(one) if isinstance(wanted, set) else list(one)
        assert identical(found, wanted), (found, wanted)


def main(folder: Path) -> None:
    """Share, save, open and read all kinds."""
    sys.meta_path.insert(0, FINDER)
    for rows in ROWS.values():
        compare(shmloader.share(rows), rows, folder)
        compare(shmloader.share(iter(rows)), rows, folder)
        shmloader.share(rows).take(range(len(rows)))
    compare(
        shmloader.share({f"key {n}": n for n in range(MANY)}), {f"key {n}": n for n in range(MANY)}, folder
    )
    compare(shmloader.share({(n, "a") for n in range(MANY)}), {(n, "a") for n in range(MANY)}, folder)
    compare(shmloader.share(pa.table({"a": pa.nulls(3)}).select([])), [{}] * 3, folder)
    shared = shmloader.share(Boxes())
    assert isinstance(shared.boxes, Store)
    loader = shmloader.DataLoader(shared, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert [(box["id"], imports) for box, imports in loader] == [(n, 0) for n in range(8)]
    if FINDER.imports:
        sys.exit("".join(FINDER.imports))


def test_a_program_that_shares_and_reads_imports_no_pandas(tmp_path: Path) -> None:
    """pandas need not be installed: the interpreter notices that it is searched for."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [*warm_python(), __file__, tmp_path],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]))
