"""Arrays over an ``np.memmap`` reach spawned workers by their file: equal, and in memory once."""

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset

import shmloader.store.memory  # noqa: F401 - it registers the reducers
from shmloader import DataLoader, LoaderError, WorkerDied
from shmloader.store import handles

ROWS, COLUMNS = 50, 1 << 17  # 50 MB of int64
NBYTES = ROWS * COLUMNS * 8


class Rows(Dataset):
    """Row ``i`` is its first and last number, and a description of the array."""

    def __init__(self, array: Any, **others: Any) -> None:
        self.array = array
        self.others = others

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.array[index]
        return torch.tensor([int(row.flat[0]), int(row.flat[-1])])


class Describes(Rows):
    """Sample ``i`` describes the array as the worker has it."""

    def __getitem__(self, index: int) -> str:
        return describe(self.array)


class Writes(Rows):
    """Sample ``i`` writes ``i`` to row ``i``."""

    def __getitem__(self, index: int) -> int:
        self.array[index] = 1000 + index
        return index


def describe(array: Any) -> str:
    more = (Path(array.filename).name, array.mode, array.offset) if type(array) is np.memmap else ()
    return repr((type(array), array.dtype, array.shape, array.strides, array.flags.writeable, more, array))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(32 * 6, dtype=np.int32).reshape(32, 6))
    return path


def samples(dataset: Dataset, method: str = "forkserver", **options: Any) -> list[Any]:
    with DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context=method, **options
    ) as loader:
        return list(loader)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.parametrize("view", [lambda m: m, np.asarray], ids=["memmap", "asarray"])
def test_each_worker_has_little_memory_of_its_own(
    method: str, view: Callable[[Any], Any], tmp_path: Path, warm_helpers: None
) -> None:
    path = tmp_path / "large.npy"
    np.save(path, np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS))
    private_nbytes = {}
    for name, dataset in {
        "mapped": Rows(view(np.load(path, mmap_mode="r"))),
        "without": Rows(np.zeros((8, 1))),
    }.items():
        with DataLoader(dataset, num_workers=2, multiprocessing_context=method) as loader:
            iterator = iter(loader)
            first, second = next(iterator), next(iterator)
            workers = [psutil.Process(process.pid) for process in iterator._workers]
            private_nbytes[name] = [worker.memory_full_info().uss for worker in workers]
        if name == "mapped":
            assert (first.tolist(), second.tolist()) == ([[0, COLUMNS - 1]], [[COLUMNS, 2 * COLUMNS - 1]])
    assert max(private_nbytes["mapped"]) < max(private_nbytes["without"]) + NBYTES // 4, private_nbytes


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda m: m,
    "asarray": np.asarray,
    "slice": lambda m: m[3:20, 1:4],
    "backwards": lambda m: m[::-1, ::-2],
    "transposed": lambda m: m.T,
    "other_type": lambda m: np.asarray(m).view(np.uint8)[:, 4:8],
    "one_row": lambda m: m[5],
    "reshaped": lambda m: m.reshape(8, 24),
    "read_only": lambda m: np.lib.stride_tricks.as_strided(np.asarray(m), writeable=False),
}


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["r", "c", "r+"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_the_same_in_the_worker(view: str, mode: Any, file: Path, warm_helpers: None) -> None:
    array = VIEWS[view](np.load(file, mmap_mode=mode))
    expected = array
    if view == "read_only":  # which is no view of the file to NumPy, and arrives as by torch's transport
        expected = pickle.loads(pickle.dumps(array))
    assert set(samples(Describes(array))) == {describe(expected)}


def test_a_raw_file_in_columns_from_an_offset_on(tmp_path: Path, warm_helpers: None) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(range(256)) * 40)
    array = np.memmap(path, np.uint16, "r", offset=5000, shape=(30, 20), order="F")
    assert set(samples(Describes(array[4:9]))) == {describe(array[4:9])}


def test_what_a_worker_writes_is_in_the_file_or_its_own(file: Path, warm_helpers: None) -> None:
    before = np.load(file)
    samples(Writes(np.load(file, mmap_mode="c")))
    assert np.array_equal(np.load(file), before)
    samples(Writes(np.load(file, mmap_mode="r+")))
    assert np.load(file)[:8, 0].tolist() == list(range(1000, 1008))


def test_a_new_file_is_not_emptied_by_workers(tmp_path: Path, warm_helpers: None) -> None:
    array = np.memmap(tmp_path / "new", np.int64, "w+", shape=(8, 3))
    array[:] = np.arange(24).reshape(8, 3)
    assert [sample.tolist() for sample in samples(Rows(array))] == [[3 * i, 3 * i + 2] for i in range(8)]
    assert array[7].tolist() == [21, 22, 23]


def test_what_the_program_has_changed_in_its_own_copy_reaches_workers(file: Path, warm_helpers: None) -> None:
    array = np.load(file, mmap_mode="c")
    array[2] = -1
    rows = [sample.tolist() for sample in samples(Rows(np.asarray(array), same=array))]
    assert rows[1:4] == [[6, 11], [-1, -1], [18, 23]]


@pytest.mark.parametrize("what", ["unlinked", "replaced", "renamed"])
def test_a_file_that_is_no_longer_under_its_name_is_sent_by_its_contents(
    what: str, file: Path, warm_helpers: None
) -> None:
    array = np.load(file, mmap_mode="r")
    if what == "renamed":
        file.rename(file.with_name("elsewhere.npy"))
    else:
        file.unlink()
    if what != "unlinked":
        np.save(file, np.zeros((32, 6), np.int32))
    assert [sample.tolist() for sample in samples(Rows(array))] == [[6 * i, 6 * i + 5] for i in range(8)]


def test_a_shortened_file_is_an_error(file: Path, warm_helpers: None) -> None:
    """A read after the end would end the process by SIGBUS."""
    array = np.load(file, mmap_mode="r")
    with file.open("r+b") as opened:
        opened.truncate(200)
    with pytest.raises(LoaderError, match=r"rows\.npy' was shortened: it has 200 bytes.* first 896"):
        samples(Rows(array))


class ReplacesItself(Rows):
    """Its file is replaced after it was pickled."""

    def __init__(self, array: Any, path: Path) -> None:
        super().__init__(array)
        self.replaces = Replaces(path)


class Replaces:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        self.path.unlink()
        np.save(self.path, np.zeros((32, 6), np.int32))
        return str, ()


def test_a_file_that_is_replaced_while_workers_start_is_an_error(file: Path, warm_helpers: None) -> None:
    with pytest.raises(WorkerDied, match="was replaced by another one while processes were being started"):
        samples(ReplacesItself(np.load(file, mmap_mode="r"), file))


def test_arrays_elsewhere_are_pickled_as_ever(file: Path) -> None:
    """Only this library's pickles use the reducers."""
    array = np.load(file, mmap_mode="r")
    assert len(pickle.dumps(array)) > array.nbytes


@pytest.mark.parametrize("protocol", [4, 5])
def test_arrays_elsewhere_are_sent_by_the_default_protocol(
    protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocol decides whether they keep their byte order; it is 5 from Python 3.14 on."""
    monkeypatch.setattr(pickle, "DEFAULT_PROTOCOL", protocol)
    array = np.arange(3, dtype=">i4")
    got = pickle.loads(ForkingPickler.dumps(array, protocol))
    assert got.tolist() == array.tolist()
    assert got.dtype.str == pickle.loads(pickle.dumps(array, protocol)).dtype.str


def test_a_reducer_that_another_library_has_registered_still_sends_what_has_no_handle() -> None:
    class Own(np.ndarray[Any, Any]):
        """Stands for the class that the library has registered."""

    ForkingPickler.register(Own, lambda array: (list, (array.tolist(),)))
    handles.register(Own, handles.reduce_array)
    assert pickle.loads(ForkingPickler.dumps(np.arange(3).view(Own))) == [0, 1, 2]
