"""Lambdas, local classes, locks and open files under spawn and forkserver: named in an error, or sent."""

import functools
import pickle
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loading import Numbered
from torch.utils.data import Dataset, default_collate

from shmloader import DataLoader

REFUSED = (TypeError, AttributeError, pickle.PicklingError)


class Holds(Numbered):
    """Holds an object that may have no pickle."""

    def __init__(self, held: Any) -> None:
        super().__init__(8)
        self.held = held


class Slotted:
    """Holds an object without a ``__dict__``."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Transformed(Dataset):
    """Applies a function to each number."""

    def __init__(self, transform: Callable[[int], Any], *others: Any) -> None:
        self.transform = transform
        self.others = others

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


@pytest.fixture
def without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)


def _refusal(dataset: Any, **options: Any) -> str:
    """The note of the error with which workers cannot be started."""
    loader = DataLoader(dataset, 2, num_workers=2, multiprocessing_context="spawn", **options)
    with pytest.raises(REFUSED) as caught:
        iter(loader)
    (note,) = caught.value.__notes__
    assert note.startswith("A shmloader worker could not be started with start method 'spawn'")
    assert note.endswith("Or pass multiprocessing_context='fork'.")
    return note


def _local_class() -> type:
    class Local(Numbered):
        pass

    return Local


def _in_a_circle(held: Any) -> Any:
    one, other = SimpleNamespace(), SimpleNamespace()
    one.other, other.one, one.held = other, one, held
    return one


@pytest.mark.usefixtures("without_cloudpickle")
@pytest.mark.parametrize(
    ("held", "path"),
    [
        (lambda held: held, "dataset.held"),
        (lambda held: {"a": [1, {"b c": held}]}, "dataset.held['a'][1]['b c']"),
        (lambda held: (None, Slotted(held)), "dataset.held[1].held"),
        (lambda held: functools.partial(print, 1, end=held), "dataset.held.keywords['end']"),
        (lambda held: Holds(held).__len__, "dataset.held.__self__.held"),
        (_in_a_circle, "dataset.held.held"),
    ],
    ids=["attribute", "containers", "slots", "partial", "method", "circle"],
)
def test_the_error_has_the_path_to_the_attribute(held: Callable[[Any], Any], path: str) -> None:
    note = _refusal(Holds(held(threading.Lock())))
    assert f" {path} is a _thread.lock: it belongs to this process. Leave it out in __getstate__()" in note
    assert "lambda" not in note


@pytest.mark.usefixtures("without_cloudpickle")
def test_lambdas_and_local_functions_are_named_with_their_line() -> None:
    function = lambda index: index  # noqa: E731 - it is what users write
    line = function.__code__.co_firstlineno
    note = _refusal(Transformed(function))
    assert f" dataset.transform is a lambda ({__file__}, line {line}): pickle finds functions" in note
    assert "install cloudpickle" in note
    assert " collate_fn is a lambda (" in _refusal(Numbered(8), collate_fn=lambda samples: samples)

    def init(_: int) -> None: ...

    name = "test_lambdas_and_local_functions_are_named_with_their_line.<locals>.init"
    assert f" worker_init_fn is the function '{name}' (" in _refusal(Numbered(8), worker_init_fn=init)
    assert " dataset is of the class '_local_class.<locals>.Local': " in _refusal(_local_class()(8))


@pytest.fixture(params=["text", "bytes", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "file"
    makes = {"text": lambda: path.open("w"), "bytes": lambda: path.open("wb")}
    one = makes.get(request.param, lambda: sqlite3.connect(path))()
    yield one
    one.close()


@pytest.mark.usefixtures("without_cloudpickle")
def test_what_is_open_is_to_be_opened_in_the_worker(opened: Any) -> None:
    kind = f"{type(opened).__module__}.{type(opened).__qualname__}"
    note = _refusal(Holds(opened))
    assert f" dataset.held is a {kind}: it is open in this process only. Keep its path, and open it" in note


@pytest.mark.usefixtures("without_cloudpickle")
def test_other_objects_are_named_by_their_class() -> None:
    note = _refusal(Holds(number for number in range(3)))
    assert " dataset.held is a generator, which pickle refuses. Leave it out in __getstate__()" in note


class RefusesItself(Numbered):
    """Refuses in its own words, which pickle cannot know."""

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("not this one")


def test_what_a_dataset_raises_itself_is_raised() -> None:
    loader = DataLoader(RefusesItself(8), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(TypeError, match="not this one") as caught:
        iter(loader)
    assert " dataset is a test_unpicklable.RefusesItself, which pickle refuses." in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"], indirect=True
)
def test_with_cloudpickle_lambdas_and_local_classes_work(start_method: str) -> None:
    pytest.importorskip("cloudpickle")
    factor = 3

    class Local(Transformed):
        pass

    def local(index: int) -> int:
        return -index

    dataset = Local(lambda index: factor * local(index))
    with DataLoader(
        dataset,
        2,
        num_workers=2,
        multiprocessing_context=start_method,
        collate_fn=lambda samples: default_collate(samples) + 1,
    ) as loader:
        batches = [batch.tolist() for batch in loader]
    assert batches == [[1 - 3 * index, 1 - 3 * (index + 1)] for index in range(0, 8, 2)]


def test_handles_and_large_arrays_travel_as_they_do_without_a_lambda(warm_helpers: None) -> None:
    pytest.importorskip("cloudpickle")
    import multiprocessing

    import numpy as np
    from startup_datasets import HoldsHandles, memory_files

    context = multiprocessing.get_context("forkserver")
    dataset = HoldsHandles(8, context)
    dataset.event.set()
    dataset.rows = np.arange(100_000)
    with DataLoader(
        dataset,
        8,
        num_workers=1,
        multiprocessing_context=context,
        collate_fn=lambda samples: (samples, memory_files(samples)),
    ) as loader:
        ((samples, files),) = loader
    assert [int(one) for one in samples] == list(range(8))
    assert dataset.value.value == 8
    assert "map /memfd:shmloader-arrays (deleted)" in files
    dataset.close()


def test_with_cloudpickle_a_lock_and_an_open_file_are_refused_all_the_same(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    lock = threading.Lock()
    note = _refusal(Transformed(lambda index: index, {"lock": lock}))
    assert " dataset.others[0]['lock'] is a _thread.lock: " in note
    note = _refusal(Transformed(lambda index: lock.locked() + index))
    assert " dataset.transform (variable lock) is a _thread.lock: " in note
    with (tmp_path / "file").open("w+") as file:
        assert " dataset.others[0] is a _io.TextIOWrapper: it is open in this" in _refusal(
            Transformed(lambda index: index, file)
        )
