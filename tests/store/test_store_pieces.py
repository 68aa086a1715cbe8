"""Memory used beside a store while it is written piece by piece, if some rows are far larger."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, cycle, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shmloader import open as open_store
from shmloader import share
from shmloader.store.chunks import Chunks


def test_rows_that_become_far_larger_are_taken_in_smaller_pieces() -> None:
    small, large = np.zeros(1), np.zeros(25_000)
    different = large, large.copy(), large.copy()
    store = share(chain(repeat(small, 40_000), islice(cycle(different), 8000)))
    ends = np.array(store.chunks.starts[1:])
    pieces = np.diff(store.chunks.starts)[ends > 44_000]  # after the one in which they become larger
    assert pieces.max() * large.nbytes < 256 << 20
    assert (store[39_999] == small).all()
    assert (store[-1] == large).all()


def random_rows(count: int) -> list[bytes]:
    return [np.random.default_rng(n).bytes(40_000) for n in range(count)]


# The rows are made in the test: each worker of the suite is forked with what is in memory.
@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (lambda: ["x" * 40_000, *["y" * 40_000] * 999], None),  # the file has each text once
        (lambda: [b"", *random_rows(999)], None),
        (lambda: [b""] * 100 + random_rows(900), ["a.b"]),
    ],
    ids=["repeated", "different", "small at first"],
)
def test_parquet_is_decoded_in_batches_of_so_many_bytes(
    make: Callable[[], list[Any]], columns: list[str] | None, tmp_path: Path
) -> None:
    rows = make()
    pq.write_table(pa.table({"a.b": rows, "n": range(1000)}), tmp_path / "rows.parquet")
    store = open_store(tmp_path / "rows.parquet", columns=columns)
    assert max(batch.nbytes for batch in store.chunks.batches) < 20 << 20
    assert list(store["a.b"]) == rows


def test_a_batch_of_parquet_has_as_many_rows_as_its_columns_are_small(tmp_path: Path) -> None:
    words = pa.array([str(n) * 1000 for n in range(2000)]).dictionary_encode()
    table = pa.table({"large": [b"x" * 20_000] * 2000, "word": words, "n": range(2000)})
    pq.write_table(table, tmp_path / "rows.parquet")
    for columns in (["word", "n"], ["large", "word", "n"]):
        store = open_store(tmp_path / "rows.parquet", columns=columns)
        assert len(store.chunks.batches) == 1  # each batch has all words
    assert store[1999] == {"large": b"x" * 20_000, "word": "1999" * 1000, "n": 1999}


def test_what_a_store_of_many_pieces_is_and_its_fields_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = pa.record_batch({"label": list(range(10))})
    store = share(pa.Table.from_batches([batch] * 100))
    asked: list[int] = []
    column = Chunks.column
    monkeypatch.setattr(Chunks, "column", lambda self, chunk: asked.append(chunk) or column(self, chunk))
    assert store.nbytes == store.describe().nbytes
    assert store["label"][12] == 2
    assert repr(store)
    looked = len(asked)
    assert [store["label"][number] for number in (999, 12)] == [9, 2]
    assert store.nbytes
    assert repr(store)
    assert len(asked) == looked + 1  # the reader of the last piece
    assert store["label"] is store["label"]
