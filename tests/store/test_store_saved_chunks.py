"""Stores of several chunks in files, which have one column of them: rows that repeat, chunks that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from store_samples import same

from shmloader import open as open_store
from shmloader import share


def saved(rows: list[Any], path: Path) -> Any:
    """Rows in several chunks, saved and opened."""
    store = share(iter(rows))
    assert len(store.chunks.batches) > 1
    assert same(list(store), rows)
    store.save(path)
    return list(open_store(path, allow_pickle=True))


NOTHING: dict[str, Any] = {}


@pytest.mark.parametrize(
    "rows", [[NOTHING] * 300, [{"a": NOTHING, "n": n} for n in range(300)]], ids=["rows", "fields"]
)
def test_an_empty_dict_that_repeats_is_saved(rows: list[Any], tmp_path: Path) -> None:
    assert same(saved(rows, tmp_path / "rows.arrow"), rows)
