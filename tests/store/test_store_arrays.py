"""Stores as NumPy arrays: the same as a list of the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from store_samples import Point, same

from shmloader import DataLoader, share

ROWS: dict[str, list[Any]] = {
    "ints": [*range(40)],
    "ints and None": [1, None] * 20,
    "tuples": [(n, n + 1) for n in range(40)],
    "three tuples": [(1, 2), (3, 4), (5, 6)],
    "tuples of texts": [(n, "a") for n in range(40)],
    "namedtuples": [Point(n, n / 2) for n in range(40)],
    "tuples of arrays": [(np.arange(2) + n, np.arange(2)) for n in range(40)],
    "dicts": [{"a": n} for n in range(40)],
    "dicts of different keys": [{"a": n} if n % 2 else {} for n in range(40)],
    "lists": [[n, 2] for n in range(40)],
    "tensors": [torch.arange(3) + n for n in range(40)],
    "arrays of another byte order": [np.arange(3, dtype=">f4") + n for n in range(40)],
    "numpy scalars": [np.float32(n) for n in range(40)],
    "nothing": [],
}


@pytest.mark.parametrize("name", ROWS)
def test_a_store_is_the_array_that_its_rows_are(name: str) -> None:
    rows = ROWS[name]
    store = share(rows)
    assert same(np.array(store), np.array(rows))
    assert same(np.array(store[1::2]), np.array(rows[1::2]))
    if rows:
        assert same(np.array(store[[2, 0, -1]]), np.array([rows[2], rows[0], rows[-1]]))
        assert len(np.array(store[:0])) == 0


def test_numpy_permutes_the_rows() -> None:
    rows = [(n, -n) for n in range(100)]
    permuted = np.random.RandomState(0).permutation(share(rows))  # type: ignore[arg-type]  # a sequence
    assert sorted(map(tuple, permuted.tolist())) == rows


@pytest.mark.filterwarnings(
    "ignore:In future, it will be an error for 'np.bool':DeprecationWarning"
)  # torch 2.6's
@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_, np.uint8, np.complex64])
def test_numpys_numbers_are_taken_as_an_array(dtype: Any) -> None:
    rows = [{"y": dtype(n % 2), "t": "a"} for n in range(100)]
    wanted = np.array([row["y"] for row in rows])
    for store in (share(rows), share(iter(rows))):
        for indices in ([5, -1], [*range(60)]):
            assert same(store["y"].take(indices), wanted[indices])
            assert same(store.take(indices)["y"], wanted[indices])
            out = np.empty(len(indices), dtype)
            store["y"].take(indices, out=torch.from_numpy(out))
            assert same(out, wanted[indices])
        batches = [list(DataLoader(one, batch_size=30)) for one in (store, rows)]
        assert same(*batches)
    texts = [np.str_("a")] * 40
    assert same(share(texts).take([1, 2]), texts[:2])
