"""One rule for `share`'s argument and its contents, and one warning for data that cannot be shared."""

from __future__ import annotations

import multiprocessing
import threading
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from shmloader import NotSharedWarning, share
from shmloader.store import MappingStore, SetStore, Store, objects
from shmloader.store.handles import MappedFiles, is_shared, pack, unpack
from shmloader.store.testing import identical as same

ROWS = 30_000


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Names(list[str]):
    """Adds nothing to a list."""


class Table(dict[str, Any]):
    """Adds nothing to a dict."""


class Logged(list[str]):
    """Adds a method."""

    def first(self) -> str:
        return self[0]


def texts(rows: int = ROWS) -> list[str]:
    return [f"text {number}" for number in range(rows)]


def coco() -> dict[str, Any]:
    images = [{"id": n, "file_name": f"{n:012d}.jpg", "width": 640, "height": 480} for n in range(ROWS // 3)]
    boxes = [
        {"id": n, "image_id": n // 3, "bbox": [n / 2, 1.5, 20.0, 30.5], "category_id": n % 80, "iscrowd": 0}
        for n in range(ROWS)
    ]
    return {"info": {"year": 2017}, "images": images, "annotations": boxes, "categories": [{"id": 1}]}


def either_way(data: Any) -> list[Any]:
    """Data after sharing: shared itself, and shared as an attribute."""
    return [share(data), share(Holder(data=data)).data]


def test_few_large_containers_stay_one_with_its_elements_shared() -> None:
    for shared in either_way(coco()):
        assert type(shared) is dict
        assert isinstance(shared["annotations"], Store)
        assert isinstance(shared["images"], Store)
        assert shared["info"] == {"year": 2017}
        assert shared == coco()
    for data in (
        {"train": texts(), "val": texts()},
        [texts(), texts()],
        (texts(), 5),
        OrderedDict(a=texts()),
    ):
        for shared in either_way(data):
            assert type(shared) is type(data)
            first = next(iter(shared.values())) if isinstance(shared, dict) else shared[0]
            assert isinstance(first, Store)
    ordered = OrderedDict(a=texts(), b=texts(5))
    ordered.move_to_end("a")
    for shared in either_way(ordered):
        assert list(shared) == ["b", "a"]
    grouped = defaultdict(list, {"train": texts()})
    for shared in either_way(grouped):
        assert shared["nothing"] == []
        assert isinstance(shared["train"], Store)


CONTAINERS: dict[str, Callable[[], Any]] = {
    "deque": lambda: deque(texts()),
    "array of objects": lambda: np.array(texts(), object),
    "subclass of list": lambda: Names(texts()),
    "OrderedDict": lambda: OrderedDict((text, n) for n, text in enumerate(texts())),
    "defaultdict": lambda: defaultdict(list, {text: [n] for n, text in enumerate(texts())}),
    "Counter": lambda: Counter(texts()),
    "subclass of dict": lambda: Table((text, n) for n, text in enumerate(texts())),
    "set": lambda: set(texts()),
    "frozenset": lambda: frozenset(texts()),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_of_the_standard_library_are_shared(name: str) -> None:
    data = CONTAINERS[name]()
    for shared in either_way(data):
        assert isinstance(shared, Store | MappingStore | SetStore)
        assert len(shared) == len(data)
        if isinstance(data, dict):
            assert shared == data
            assert shared["text 7"] == data["text 7"]
        else:
            assert set(shared) == set(data)
            assert "text 7" in shared
        if isinstance(shared, MappingStore) and name == "Counter":
            assert shared["nothing"] == 0
    assert isinstance(share(Holder(data=set(texts()))).data & {"text 1", "x"}, set)


def test_what_adds_a_method_keeps_it() -> None:
    holder = Holder(data=Logged(texts()))
    assert share(holder).data is holder.data


def test_objects_in_several_containers_are_in_memory_once() -> None:
    """pycocotools has the same annotations in a list, by id and by image."""
    boxes = coco()["annotations"]
    by_id = {box["id"]: box for box in boxes}
    by_image = defaultdict(list)
    for box in boxes:
        by_image[box["image_id"]].append(box)
    alone = share(boxes).nbytes
    shared = share(Holder(boxes=boxes, by_id=by_id, by_image=by_image))
    assert shared.boxes == boxes
    assert shared.by_id == by_id
    assert shared.by_image == by_image
    assert shared.by_image["nothing"] == []
    whole = shared.boxes.buffer.nbytes
    assert whole < alone + 24 * ROWS  # a number and an index entry each, not another copy
    again = unpack(*pack(shared))
    assert again.by_image[3] == by_image[3]


def test_what_repeats_inside_of_rows_is_in_memory_once(tmp_path: Path) -> None:
    words, picture = [f"word {n}" for n in range(1000)], np.arange(100_000)
    rows = [{"n": n, "words": words, "picture": picture} for n in range(5000)]
    store = share(rows)
    assert store.nbytes < 2_000_000
    assert store[4999]["words"] == words
    assert np.array_equal(store[17]["picture"], picture)
    assert store.take([3, 4])["n"].tolist() == [3, 4]
    store.save(tmp_path / "rows.arrow")
    assert (tmp_path / "rows.arrow").stat().st_size < 4_000_000


# Warnings.


def left(**attributes: Any) -> str:
    """The text of the one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shared = share(Holder(**attributes, texts=texts()))
    assert isinstance(shared.texts, Store)
    (warning,) = caught
    assert warning.category is NotSharedWarning
    return str(warning.message)


def test_one_element_that_cannot_be_kept_is_the_one_to_blame() -> None:
    many: list[Any] = [f"some longer text {number}" for number in range(100_000)]
    many[77_777] = lambda: None
    text = left(many=many)
    assert "Holder.many, a list of about" in text
    assert "its element [77777] is a function" in text
    assert "Leave it out" in text


def test_all_that_could_not_be_shared_is_one_warning() -> None:
    text = left(
        learnt=torch.zeros(2000, 1000, requires_grad=True),
        table=np.full((1000, 100), "object " * 10, object),
        locks=[threading.Lock() for _ in range(200_000)],
    )
    assert text.count("\n") == 3
    assert "Holder.learnt, a Tensor of about 8,000,300 bytes" in text
    assert "Tensor.detach" in text
    assert "Holder.table, a ndarray" in text
    assert "Holder.locks, a list" in text
    assert "element [0] is a lock" in text


# Arrays, tensors, Arrow data and files.


def in_memory_once(value: Any) -> bool:
    return is_shared(value, MappedFiles())


def test_an_array_and_a_tensor_stay_what_they_are() -> None:
    for shared in either_way(np.arange(1 << 18)):
        assert type(shared) is np.ndarray
        assert in_memory_once(shared)
        assert in_memory_once(shared[5:100])
        assert not shared.flags.writeable
        assert share(shared) is shared
    for tensor in either_way(torch.arange(1 << 18)):
        assert type(tensor) is torch.Tensor
        assert in_memory_once(tensor)
        assert in_memory_once(tensor[3:])


def test_overlapping_items_of_a_view_are_in_memory_once() -> None:
    series = np.arange(1 << 18, dtype=np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(series[5:], 1 << 17)  # 69 GB, if each were copied
    for shared in either_way(windows):
        assert is_shared(shared, None)
        assert not shared.flags.writeable
        assert (shared.shape, shared.dtype, shared.strides) == (windows.shape, windows.dtype, windows.strides)
        np.testing.assert_array_equal(shared[::7919, ::997], windows[::7919, ::997])
    tensor = torch.arange(8, dtype=torch.bfloat16)[3:, None].expand(5, 1 << 40)
    for shared in either_way(tensor):
        assert is_shared(shared, None)
        assert (shared.shape, shared.dtype) == (tensor.shape, tensor.dtype)
        assert shared[:, 1 << 39].tolist() == [3, 4, 5, 6, 7]
    rows = share(np.broadcast_to(np.array(b"ab"), (1 << 40, 2)))
    assert rows[1 << 39].tolist() == [b"ab", b"ab"]


def test_a_shared_tensor_of_a_dataset_is_saved_by_torch(tmp_path: Path) -> None:
    shared = share(Holder(weights=torch.arange(1 << 18)))
    torch.save({"weights": shared.weights}, tmp_path / "state.pt")
    assert torch.equal(torch.load(tmp_path / "state.pt")["weights"], shared.weights)


def test_arrow_tables_stay_tables_over_shared_memory() -> None:
    table = pa.table({"n": range(ROWS * 10), "s": [str(n) for n in range(ROWS * 10)]})
    shared = share(Holder(table=table, column=table["s"])).__dict__
    for name, original in (("table", table), ("column", table["s"])):
        assert type(shared[name]) is type(original)
        assert shared[name].equals(original)
        packed, buffers = pack(shared[name])
        assert len(packed) < 20_000
        assert len(buffers) == 1
        assert unpack(packed, buffers).equals(original)
    assert isinstance(share(table), Store)
    assert share(table)[7] == {"n": 7, "s": "7"}


def mapped(folder: Path) -> dict[str, Any]:
    whole = np.memmap(folder / "data", np.int64, "w+", shape=(1 << 18,))
    whole[:] = np.arange(1 << 18)
    whole.flush()
    array = np.memmap(folder / "data", np.int64, "r")
    tensor = torch.from_file(str(folder / "data"), shared=False, size=1 << 18, dtype=torch.int64)
    return {"memmap": array, "asarray": np.asarray(array)[3:], "tensor": tensor, "strided": array[::-7]}


def path_of(value: Any) -> str | None:
    """The file that an array or a tensor is mapped from."""
    address = np.asarray(value).__array_interface__["data"][0]
    items = MappedFiles().items_at(address, address + 8)
    return None if items is None else items.path


def read_mapped(holder: Any, pipe: Connection) -> None:
    values = vars(holder)
    pipe.send({name: (int(value[5]), len(value), path_of(value)) for name, value in values.items()})


def test_mapped_files_stay_files_and_are_sent_by_path(tmp_path: Path, warm_helpers: None) -> None:
    values = mapped(tmp_path)
    shared = share(Holder(**values))
    assert all(getattr(shared, name) is value for name, value in values.items())
    assert share(values["memmap"]) is values["memmap"]
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_mapped, args=(shared, theirs))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    process.close()
    ours.close()
    path = str(tmp_path / "data")
    assert found == {name: (int(value[5]), len(value), path) for name, value in values.items()}


# Samples that are changed in place, and indexing.


def test_samples_may_have_arrays_of_their_own() -> None:
    rows = [{"image": np.full((2, 2), n), "tensor": torch.full((3,), n)} for n in range(100)]
    for store in (share(rows, copy=True), unpack(*pack(share(rows, copy=True)))):
        sample = store[7]
        sample["image"] += 1
        sample["tensor"].add_(1)
        assert (store[7]["image"] == 7).all()
        assert store[7]["tensor"].tolist() == [7, 7, 7]
    with pytest.raises(ValueError, match="read-only"):
        share(rows)[7]["image"] += 1


def test_rows_are_chosen_in_the_ways_that_people_know() -> None:
    rows = [{"label": n % 10, "path": f"{n}.jpg"} for n in range(1000)]
    store = share(rows)
    labels = store["label"]
    assert isinstance(labels, Store)
    assert labels == [row["label"] for row in rows]
    assert np.asarray(labels).tolist() == list(labels)
    threes = store[np.asarray(labels) == 3]
    assert threes == [row for row in rows if row["label"] == 3]
    assert threes["path"][-1] == "993.jpg"
    assert store[[1, -1]] == [rows[1], rows[-1]]
    assert store.select(range(5)) == rows[:5]
    many = store.select(np.arange(1000).repeat(100))
    assert len(pack(many)[0]) < 2000  # the numbers are in shared memory too
    with pytest.raises(KeyError):
        store["nothing"]
    text = repr(store)
    assert "1,000 rows" in text
    assert "label: 0, path: '0.jpg'" in text


def test_a_description_tells_the_fields() -> None:
    rows = [{"path": Path(f"{n}.jpg"), "n": n, "odd": 1j, "box": np.zeros((n % 3, 4))} for n in range(100)]
    fields = {field.name: field for field in share(rows).describe().fields}
    assert list(fields) == ["path", "n", "odd", "box"]
    assert fields["path"].type == "path PosixPath"
    assert fields["n"].type == "int8"
    assert fields["n"].nbytes == 100
    assert fields["odd"].pickled == "no column gives back builtins.complex as given"
    assert fields["box"].pickled is None
    assert "odd: pickle" in str(share(rows).describe())


def test_optional_keys_are_columns_in_any_number() -> None:
    keys = [f"key {n}" for n in range(100)]
    rows = [dict.fromkeys(keys[n % 5 :: 2], None if n % 7 == 0 else n) for n in range(2000)]
    store = share(rows)
    assert [list(row.items()) for row in store] == [list(row.items()) for row in rows]
    assert not [field for field in store.describe().fields if field.pickled]
    assert len(store.describe().fields) == 100


class Pictures:
    def __init__(self, whole: Any) -> None:
        self.part = whole[1000:900_000:3]
        self.whole = whole
        self.first = whole[:200_000]


@pytest.mark.parametrize("make", [np.arange, torch.arange], ids=["array", "tensor"])
def test_views_of_one_array_stay_views_of_one_memory(make: Any) -> None:
    plain = Pictures(make(1_000_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared = share(plain)
    begin = np.asarray(shared.whole).ctypes.data
    assert np.asarray(shared.part).ctypes.data == begin + 1000 * 8
    assert np.asarray(shared.first).ctypes.data == begin
    for name in ("part", "whole", "first"):
        found, wanted = getattr(shared, name), getattr(plain, name)
        assert same(found, wanted)
        assert is_shared(found, None)
        assert type(found) is torch.Tensor or not found.flags.writeable


def test_overlapping_views_count_for_the_memory_that_they_take() -> None:
    series = np.zeros(100_000)
    windows = np.lib.stride_tricks.sliding_window_view(series, 1000)
    for one in (windows, torch.zeros(1000).expand(5000, 1000)):
        assert one.nbytes > 1 << 23
        assert objects.estimate_nbytes(one) < 1 << 20


def test_a_field_of_rows_that_have_none_is_an_error_that_says_what_rows_are() -> None:
    rows: list[Any] = [{"a": 1} for _ in range(4)]
    for row in rows:
        row["itself"] = row
    with pytest.raises(KeyError, match="pickle"):
        share(rows)["a"]
    with pytest.raises(KeyError, match="'int8'"):
        share([1, 2])["a"]
