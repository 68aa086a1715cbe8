"""What forked workers copy by reading it causes one warning, which names the owner and what helps."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import re
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caught_warnings import caught_warnings

import shmloader
from shmloader import DataLoader, NotSharedWarning, share
from shmloader.statistics import Counters
from shmloader.store import graph, unshared
from shmloader.store.unshared import CopiedMemory, CopyWatch

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def smaller_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unshared, "LEAST_NBYTES", 12 << 20)


def make(rows: int = 200_000) -> list[dict[str, Any]]:
    return [{"path": f"folder/image-{number}.jpeg", "label": number + 1000} for number in range(rows)]


class Dataset:
    def __init__(self, samples: Any, **more: Any) -> None:
        self.size = (224, 224)
        self.images = {"samples": samples, "names": ["a", "b"]}
        self.array = np.zeros(8 << 20)
        vars(self).update(more)

    def read(self) -> Any:
        return sum(sample["label"] for sample in self.images["samples"])


@contextmanager
def forked(read: Callable[[], Any], workers: int = 1) -> Iterator[list[Any]]:
    """Processes that run a function, each once an element of the list that is yielded is called."""
    # Garbage of other tests that a process collects would hide as much of what it allocates.
    gc.collect()
    pipes = [FORK.Pipe() for _ in range(workers)]

    def serve(pipe: Any) -> None:
        gc.freeze()  # as in a worker: a collection here would copy what other tests keep
        while pipe.recv():
            read()
            pipe.send("done")

    processes = [FORK.Process(target=serve, args=(theirs,)) for _, theirs in pipes]
    for process in processes:
        process.start()
    try:
        yield list(zip(processes, [ours for ours, _ in pipes], strict=True))
    finally:
        for process, (ours, theirs) in zip(processes, pipes, strict=True):
            ours.send("")
            process.join()
            process.close()
            ours.close()
            theirs.close()


def said(
    dataset: Any,
    read: Callable[[], Any],
    *,
    workers: int = 1,
    meanwhile: Callable[[], Any] = lambda: None,
    is_shared: bool = False,
    batch_nbytes: int = 0,
) -> str:
    """The advice after forked workers have run a function, and this process ``meanwhile`` another one."""
    with forked(read, workers) as pairs:
        processes = [process for process, _ in pairs]
        watch = CopyWatch(dataset, processes, Counters(), is_shared=is_shared)
        for _, pipe in pairs:
            pipe.send("read")
            assert pipe.recv() == "done"
        meanwhile()
        return warned(watch, processes, batch_nbytes)


def warned(watch: CopyWatch, processes: list[Any], batch_nbytes: int = 0) -> str:
    """The warning at an epoch's end."""
    watch.measure(processes, batch_nbytes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.warn()
    return "".join(str(warning.message) for warning in caught)


def test_a_list_that_a_worker_copies_is_named_with_what_helps() -> None:
    dataset = Dataset(make())
    text = said(dataset, dataset.read)
    assert re.search(r"Dataset\.images\['samples'\], of type list, has about [\d,]{10,} bytes", text)
    assert "DataLoader(..., share_dataset=True)" in text
    (copied,) = re.findall(r"copied up to ([\d,]+) bytes", text)
    assert 20e6 < int(copied.replace(",", "")) < 80e6


def test_a_store_in_its_place_is_not_copied() -> None:
    dataset = Dataset(share(make()))
    assert said(dataset, dataset.read) == ""


class Image:
    def __init__(self, number: int) -> None:
        self.path = f"folder/image-{number}.jpeg"
        self.boxes = [number + 0.5, number + 1000]


class Images(list[Any]):
    def first(self) -> Any:
        return self[0]


def of_objects(dataset: Any) -> Any:
    return sum(len(image.boxes) for images in dataset.parts for image in images)


@pytest.mark.parametrize(
    ("kind", "make_parts", "read", "path"),
    [
        ("list", lambda: [[Image(n) for n in range(500)] for _ in range(200)], of_objects, "parts"),
        ("Images", lambda: Images(make()), lambda d: sum(row["label"] for row in d.parts), "parts"),
        (
            "mappingproxy",
            lambda: types.MappingProxyType(dict(enumerate(make()))),
            lambda d: sum(row["label"] for row in d.parts.values()),
            "parts",
        ),
        (
            "dict",
            lambda: types.SimpleNamespace(of={str(n): Image(n) for n in range(100_000)}),
            lambda d: sum(len(image.boxes) for image in d.parts.of.values()),
            r"parts\.of",
        ),
    ],
    ids="small-objects list-with-methods mapping-proxy objects-by-name".split(),
)
def test_what_share_dataset_would_not_move_is_named_without_it(
    kind: str, make_parts: Any, read: Any, path: str
) -> None:
    dataset = types.SimpleNamespace(parts=make_parts())
    text = said(dataset, lambda: read(dataset))
    assert re.search(rf"SimpleNamespace\.{path}, of type {kind}, has about", text)
    assert "share_dataset=True does not move them" in text


ROWS: list[Any] = []


class OfItsClass:
    rows: Any = ROWS

    def __init__(self) -> None:
        self.few = [1, 2]

    def read(self) -> Any:
        return sum(row["label"] for row in self.rows)


def test_without_an_owner_the_size_is_told_and_where_to_look() -> None:
    ROWS[:] = make()
    try:
        dataset = OfItsClass()
        text = said(dataset, dataset.read, workers=2)
        # With one worker, what this process writes to looks the same.
        assert said(dataset, dataset.read) == ""
    finally:
        ROWS.clear()
    assert re.search(r"each of 2 workers has copied up to [\d,]{10,} bytes", text)
    assert re.search(r"of \d+ objects .* OfItsClass(\.few)? holds most, about \d+ bytes", text)
    assert "Look at globals, class attributes, default arguments and closures" in text


# --- no false alarms


def test_a_workers_own_memory_is_none_of_it() -> None:
    dataset = Dataset(make())
    shared, kept = mmap.mmap(-1, 96 << 20), []

    def work() -> None:
        kept.append(mmap.mmap(-1, 96 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))  # as a heap and a cache
        for memory in (*kept, shared):  # as slots
            memory.write(b"x" * (96 << 20))

    assert said(dataset, work) == ""


def test_weights_that_this_process_trains_are_none_of_it() -> None:
    weights = torch.zeros(16 << 20)
    dataset = Dataset(make(), model=torch.nn.ParameterList([torch.nn.Parameter(weights)]))
    assert said(dataset, int, meanwhile=lambda: weights.add_(1)) == ""


def test_some_batches_are_none_of_it() -> None:
    dataset = Dataset(make())
    assert said(dataset, dataset.read, batch_nbytes=1 << 20)
    assert said(dataset, dataset.read, batch_nbytes=64 << 20) == ""


def test_little_costs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unshared, "LEAST_NBYTES", 64 << 20)
    monkeypatch.setattr(CopiedMemory, "nbytes", lambda self: pytest.fail("measured"))
    dataset = Dataset(make(10_000))
    assert said(dataset, dataset.read) == ""


def test_persistent_workers_are_measured_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr(CopiedMemory, "most_nbytes", lambda self: measured.append(len(epochs)) or 0)
    epochs: list[str] = []
    with forked(int) as [(process, _)]:
        watch = CopyWatch([], [process], Counters(), is_shared=False)
        while len(epochs) < 20:
            epochs.append(warned(watch, [process]))
    assert sorted(set(measured)) == [0, 1, 3, 7, 15]


def test_advice_that_fails_is_silent() -> None:
    gone = types.SimpleNamespace(pid=2**22 + 1)
    watch = CopyWatch([], [gone], Counters(), is_shared=False)
    assert warned(watch, [gone]) == warned(watch, []) == ""


# --- in the loader


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.rows = make()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return self.rows[index]["label"]


def test_the_loader_warns_once_at_the_end_of_an_epoch() -> None:
    loader = DataLoader(Rows(), batch_size=2000, num_workers=1, multiprocessing_context="fork")
    with caught_warnings() as caught:
        assert sum(len(batch) for batch in loader) == 200_000
        assert sum(len(batch) for batch in loader) == 200_000
    (warning,) = caught
    assert warning.category is NotSharedWarning
    assert re.search(r"Rows\.rows, of .* has about .*share_dataset=True", str(warning.message))
    assert warning.filename == __file__
    with (
        DataLoader(
            Rows(), batch_size=2000, num_workers=2, multiprocessing_context="fork", share_dataset=True
        ) as shared,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", NotSharedWarning)
        assert sum(len(batch) for batch in shared) == 200_000


# --- the search


def test_a_search_is_bounded_and_says_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_MOST_NODES", 10_000)
    monkeypatch.setattr(graph, "_MOST_SECONDS", 1000.0)  # a loaded machine takes its time
    holder = types.SimpleNamespace(rows=make(20_000), parts=[[Image(n)] for n in range(9000)], late=None)
    holder.late = [types.SimpleNamespace(rows=types.SimpleNamespace(rows=make(20_000)))]
    with pytest.warns(NotSharedWarning, match=r"\.parts\[\d+\]\S* and what comes after .* after 10,001 obj"):
        shared = share(holder)
    assert type(shared.rows).__name__ == "RowStore"
    assert type(shared.parts) is list
    monkeypatch.setattr(graph, "_MOST_NODES", 10**6)
    monkeypatch.setattr(graph, "_MOST_SECONDS", 0.0)
    with pytest.warns(NotSharedWarning, match="given up"):
        share(holder)


def test_growth_around_a_lazily_opened_store_has_no_owner_to_be_named(tmp_path: Path) -> None:
    hidden = make()
    share([{"n": 1}]).save(tmp_path / "rows.parquet")

    def read() -> int:
        return sum(row["label"] for row in hidden)

    assert "No owner" in said(Dataset([]), read, workers=2)
    lazy = shmloader.open(tmp_path / "rows.parquet", lazy=True)
    assert said(Dataset([], rows=lazy), read, workers=2) == ""


def test_polars_frames_are_named_with_the_way_round() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"label": np.arange(1 << 20)})
    with pytest.warns(NotSharedWarning, match=r"frame, a DataFrame of .* keep the to_arrow\(\) of it"):
        share(Dataset([], frame=frame))
    with pytest.raises(TypeError, match=r"not Series. Share the to_arrow\(\) of it"):
        share(frame["label"])
    assert share(frame.to_arrow())[5] == {"label": 5}
