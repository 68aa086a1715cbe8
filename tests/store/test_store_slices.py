"""Slices and selections that are read row by row: the types of rows, and how much each read makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from store_samples import same

import shmloader
from shmloader import DataLoader

SCALARS: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "complex": complex,
    **{code: np.dtype(code).type for code in ("?", *"bhilqBHILQefdgFDG")},
    "datetime64": lambda n: np.datetime64(n, "s"),
    "timedelta64": lambda n: np.timedelta64(n, "us"),
    "NumPy's text": np.str_,
    "NumPy's bytes": lambda n: np.bytes_(str(n)),
    "array of float64": lambda n: np.array(float(n)),
    "array of int64": np.array,
    "array of bool": lambda n: np.array(n > 20),
    "tensor of int64": torch.tensor,
    "tensor of float64": lambda n: torch.tensor(n, dtype=torch.float64),
    "list of int": lambda n: [n, -n],
    "list of NumPy's int64": lambda n: [np.int64(n), np.int64(-n)],
    "list of lists": lambda n: [[n, n + 1], [n + 2, n + 3]],
}


@pytest.mark.parametrize("make", SCALARS.values(), ids=SCALARS)
def test_every_read_gives_the_same_type(make: Any) -> None:
    rows = [make(n) for n in range(40)]
    store = shmloader.share(rows)
    views = store[3:20], store[3:20][::2], store.select(range(3, 20))
    for view, wanted in zip(views, (rows[3:20], rows[3:20:2], rows[3:20]), strict=True):
        for _ in range(3):
            assert same([view[n] for n in range(len(view))], wanted)
            assert same(list(view), wanted)


def test_a_part_of_a_large_list_inside_of_a_row_keeps_its_types() -> None:
    items = [np.float64(n) for n in range(40_000)]
    part = shmloader.share([{"large": items}] * 2)[0]["large"][3:20]
    assert same([part[n] for n in range(17)], items[3:20])


def test_batches_of_a_slice_are_those_of_a_list() -> None:
    rows = [np.float64(n) for n in range(20)]
    wanted = list(DataLoader(rows[:9], batch_size=None))
    assert same(list(DataLoader(shmloader.share(rows)[:9], batch_size=None)), wanted)


class Fragile:
    """An object that cannot be made again if its number is 7."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["number"] == 7:
            raise ArithmeticError("row 7 cannot be made")
        vars(self).update(state)


def test_a_read_makes_no_other_row() -> None:
    store = shmloader.share([Fragile(n) for n in range(20)])
    for view in (store[:10], store.select(list(range(10)))):
        assert [view[n].number for n in (0, 1, 2, 9)] == [0, 1, 2, 9]
        with pytest.raises(ArithmeticError, match="row 7"):
            view[7]
