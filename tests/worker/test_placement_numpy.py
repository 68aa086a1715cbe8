"""NumPy's functions are what they are without placement, for all that a program may do with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from parity.compare import assert_same
from torch.utils.data import Dataset

import shmloader


class Arrays(Dataset[Any]):
    """Arrays of 16 kB, for batches of 512 kB."""

    def __len__(self) -> int:
        return 32 * 10

    def __getitem__(self, index: int) -> Any:
        return np.full((64, 64), float(index), np.float32)


class Asked:
    """An object to which NumPy passes calls on; it says which function it was given."""

    def __array_function__(self, function: Any, *_: Any) -> str:
        name = NAMES.get(function, "unknown")
        return f"{name}: {function is getattr(np, name, None)}"


class Some(list[Any]):
    """A list of a class of its own."""


NAMES = {np.stack: "stack", np.concatenate: "concatenate", np.array: "array"}


def in_class(_: list[Any]) -> Any:
    class Calls:
        array = np.array
        tensor = torch.tensor

    calls: Any = Calls()
    return calls.array([1, 2]).tolist(), calls.tensor([1, 2]).tolist()


def long_longs(rows: list[Any]) -> Any:
    rows = [row.astype("q") for row in rows]
    made = np.stack(rows), np.concatenate(rows), np.array(rows)
    return made, [array.dtype.char for array in made]


def one_site(rows: list[Any]) -> Any:
    if rows[0][0, 0] >= 160:
        dtype = np.dtype("f4", metadata={"unit": "m"})
        rows = [row.astype(dtype) for row in rows]
    made = np.array(rows)
    return made.view("f4"), str(made.dtype.metadata)


PROGRAMS: dict[str, Callable[[list[Any]], Any]] = {
    "a dict of functions": lambda _: [NAMES.get(one) for one in (np.stack, np.concatenate, np.array)],
    "like": lambda _: np.array([1.0], like=Asked()),  # type: ignore[call-overload]
    "a list of another class": lambda _: np.stack(Some([Asked()] * 2)),
    "a joined list of another class": lambda _: np.concatenate(Some([Asked()] * 2)),
    "out": lambda rows: np.concatenate(rows, out=Asked()),  # type: ignore[call-overload]
    "in a class": in_class,
    "a dtype that equals another": long_longs,
    "metadata of a dtype": one_site,
    "documentation": lambda _: (np.stack.__doc__, np.array.__doc__),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_see_numpys_own_functions(name: str) -> None:
    def collate(rows: list[Any]) -> Any:
        return np.stack(rows), np.array(rows), np.concatenate(rows), PROGRAMS[name](rows)

    with shmloader.DataLoader(Arrays(), 32, num_workers=1, collate_fn=collate) as loader:
        batches, sites = list(loader), loader.statistics().placed_sites
    assert_same(batches, [collate([Arrays()[32 * n + i] for i in range(32)]) for n in range(10)])
    assert {"numpy.stack", "numpy.array", "numpy.concatenate"} == {site.call for site in sites if site.placed}


def test_a_module_in_the_place_of_numba_needs_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", ModuleType("numba"))
    with shmloader.DataLoader(Arrays(), 32, num_workers=1, collate_fn=np.stack) as loader:
        assert len(list(loader)) == 10


@pytest.mark.parametrize(("calls", "is_placed"), [(2, True), (64, False)])
def test_a_function_that_is_called_for_small_results_above_all_stays(calls: int, is_placed: bool) -> None:
    def collate(rows: list[Any]) -> Any:
        return np.array(rows), [np.array([number, 1.5]) for number in range(calls)]

    with shmloader.DataLoader(Arrays(), 32, num_workers=1, collate_fn=collate) as loader:
        batches, (site,) = list(loader), loader.statistics().placed_sites
    assert_same(batches, [collate([Arrays()[32 * n + i] for i in range(32)]) for n in range(10)])
    assert site.placed is is_placed
    assert is_placed or "too often" in site.why


def test_an_error_of_the_programs_own_has_no_note() -> None:
    def collate(rows: list[Any]) -> Any:
        np.stack(rows)[:].resize((3, 3))

    with (
        shmloader.DataLoader(Arrays(), 32, num_workers=1, collate_fn=collate) as loader,
        pytest.raises(ValueError, match="does not own its data") as caught,
    ):
        next(iter(loader))
    assert not any("place_results" in note for note in getattr(caught.value, "__notes__", ()))
