"""What several attributes of a dataset refer to is in memory once, and each is a store like any other."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharing_datasets import FRAME_NBYTES, FRAMES, Clips
from store_samples import Person, Slotted, same
from store_strategies import ARRAYS, SCALARS, containers
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import DataLoader as TorchLoader

from shmloader import DataLoader, SharedMemoryExhausted, share
from shmloader import open as open_store
from shmloader.host.limits import Headroom
from shmloader.store import Store, kept, room
from shmloader.store.base import attach
from shmloader.store.build import write_store
from shmloader.store.mapping import MappingStore
from shmloader.store.one_buffer import StoreGroup
from shmloader.store.packing import pack, unpack
from shmloader.store.walk import share_attributes


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def store_of(value: Any) -> Any:
    """The store under what has taken an attribute's place."""
    return value if hasattr(value, "buffer") else value.store


def rows_of(value: Any) -> Any:
    """Rows, or items, by number."""
    if isinstance(value, dict):
        return list(value.items())
    return getattr(value, "pairs", value)


def alike(one: Any, other: Any) -> bool:
    """Whether about twenty rows, or items, are the same."""
    rows, wanted = rows_of(one), rows_of(other)
    step = max(1, len(wanted) // 20)
    return len(rows) == len(wanted) and all(map(same, rows[::step], wanted[::step]))


def plain(value: Any) -> Any:
    """What has been shared as it was."""
    if hasattr(value, "store"):
        return np.array(value) if isinstance(value, np.ndarray) else torch.tensor(value)
    if isinstance(value, MappingStore):
        return dict(value)
    if isinstance(value, Store):
        return list(value)
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return list(map(plain, value)) if type(value) is list else value


WORDS = {f"word {number}": number for number in range(3000)}


def arrays() -> list[Any]:
    return [np.full(1024, n) for n in range(200)]


def tensors() -> list[Any]:
    return [torch.full((1024,), n) for n in range(200)]


def texts() -> list[Any]:
    return [f"{n:06} text " * 100 for n in range(3000)]


def persons() -> list[Any]:
    return [Person(f"name of person {n}", n, [f"tag {n}", "more"]) for n in range(5000)]


def records() -> list[Any]:
    return [{"path": f"folder/of/images/image-{n}.jpeg", "label": n % 10} for n in range(20_000)]


# One attribute, another that refers to the same objects, and how many bytes more both are at most.
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], int]] = {
    "arrays by key": (arrays, lambda one: {n: one[n * 10 : n * 10 + 10] for n in range(20)}, 20_000),
    "arrays in records": (arrays, lambda one: [{"n": n, "array": a} for n, a in enumerate(one)], 30_000),
    "arrays in another order": (arrays, lambda one: random.Random(0).sample(one, 150), 30_000),
    "tensors by key": (tensors, lambda one: {n: one[n * 10 : n * 10 + 10] for n in range(20)}, 20_000),
    "arrays in pickled objects": (
        lambda: [Slotted(str(n), array) for n, array in enumerate(arrays())],
        lambda one: [Slotted("again", row.label) for row in one],
        60_000,
    ),
    "long texts": (texts, lambda one: list(reversed(one)), 60_000),
    "long texts by key": (texts, lambda one: {n: one[n::30] for n in range(30)}, 60_000),
    "small records": (records, lambda one: one[::-2], 200_000),
    "small records by key": (records, lambda one: {n: one[n::10] for n in range(10)}, 130_000),
    "dataclasses by key": (persons, lambda one: {n: one[n::10] for n in range(10)}, 50_000),
    "a dict in each record": (
        lambda: [{"n": n, "words": WORDS} for n in range(300)],
        lambda one: [{"m": row["n"], "words": row["words"]} for row in one],
        20_000,
    ),
    "what is inside of records": (
        lambda: [{"n": n, "boxes": [[n, n + 1, 2, 3], [n, 1, 1, 1], [7] * 40]} for n in range(5000)],
        lambda one: {row["n"]: row["boxes"] for row in one},
        130_000,
    ),
    "a whole array among others": (
        lambda: np.arange(300_000.0),
        lambda one: [one, *(np.full(1024, n, float) for n in range(40))],
        400_000,
    ),
    "a whole tensor among others": (
        lambda: torch.arange(300_000.0).reshape(-1, 1000),
        lambda one: [{"a": one, "b": torch.full((1024,), n)} for n in range(40)],
        400_000,
    ),
}


@pytest.mark.parametrize("other_first", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PAIRS)
def test_what_two_attributes_refer_to_is_there_once(name: str, other_first: bool, tmp_path: Any) -> None:
    make, refer, most_nbytes = PAIRS[name]
    one = make()
    other = refer(one)
    once_nbytes = share(one).nbytes
    original = Holder(other=other, one=one) if other_first else Holder(one=one, other=other)
    shared = share_attributes(original, least_nbytes=1)
    stores = [store_of(shared.one), store_of(shared.other)]
    whole = stores[0].buffer.whole
    assert stores[1].buffer.whole is whole
    assert whole.nbytes < once_nbytes + most_nbytes < 0.9 * (once_nbytes + share(other).nbytes)
    assert whole.nbytes - 8192 <= sum(store.describe().nbytes for store in stores) <= whole.nbytes
    for store, value in zip(stores, [one, other], strict=True):
        assert alike(store, value)
        if isinstance(other, dict) and store is stores[0]:
            assert store.image is not None  # it is the dict that refers to the list
        # Saved, each is complete, and has nothing of the other that it does not refer to.
        path = tmp_path / "store.arrow"
        store.save(path)
        assert path.stat().st_size < 1.2 * share(value).nbytes + 100_000
        assert alike(open_store(path), value)


def test_what_nested_datasets_refer_to_is_there_once() -> None:
    frames = arrays()
    train = Holder(frames=frames[:150], data=Subset(Holder(frames=frames), [0]))
    valid = Holder(frames=frames[150:], text="x")
    original = Holder(both=ConcatDataset([Clips(), Clips()]), train=train, valid=valid)
    original.both.datasets[1].rows = list(original.both.datasets[0].rows)
    shared = share_attributes(original)
    whole = store_of(shared.train.frames).buffer.whole
    once_nbytes = 200 * 8192 + 2 * FRAMES * FRAME_NBYTES + share(Clips().rows).nbytes
    assert whole.nbytes < once_nbytes + 40 * 8 * 20_000 // 2
    assert same(list(shared.valid.frames), frames[150:])
    assert same(list(shared.train.data.dataset.frames), frames)
    assert shared.both.datasets[1].rows == original.both.datasets[1].rows


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_read_what_is_there_once(start_method: str) -> None:
    original = Clips()
    loader = DataLoader(original, 50, num_workers=1, multiprocessing_context=start_method, share_dataset=True)
    shared = loader.dataset
    whole = shared.frames.buffer.whole
    rows_nbytes = share(original.rows).nbytes
    assert whole.nbytes < FRAMES * FRAME_NBYTES + rows_nbytes + 8 * 20_000 + 60_000
    assert {id(getattr(shared, name).buffer.whole) for name in vars(original)} == {id(whole)}
    for batch, wanted in zip(loader, TorchLoader(original, 50), strict=True):
        assert batch.keys() == wanted.keys()
        assert all(torch.equal(batch[name], wanted[name]) for name in wanted)
    loader.close()


def test_the_whole_goes_by_handle_and_each_part_can_be_attached_to_alone() -> None:
    shared = share(Clips())
    pickled, buffers = pack(shared)
    assert len(buffers) == 1
    assert len(pickled) < 4000
    there = unpack(pickled, buffers)
    assert there.by_video == shared.by_video
    assert there.by_class == shared.by_class
    only, buffers = pack(shared.by_class)
    assert attach(unpack(only, buffers).buffer) == Clips().by_class


def test_parts_that_refer_to_nothing_else_are_saved_without_a_copy(tmp_path: Any) -> None:
    """Offsets count from the begin of all parts; a file of one says with which offset it begins."""
    first = np.zeros(1 << 18)
    ragged = [np.full(n % 50 + 1, n) for n in range(3000)]
    values: dict[str, Any] = {
        "array": np.arange(1 << 18).reshape(-1, 8),
        "fortran": np.asfortranarray(np.arange(1 << 18).reshape(-1, 8)),
        "tensor": torch.arange(1 << 18).reshape(-1, 4).to(torch.bfloat16),
        "ragged": ragged,
        "pickled": [Slotted(f"path {n}", ragged[n]) for n in range(3000)],  # type: ignore[arg-type]
        "texts": [[f"text {n}" * (n % 9), n, None] for n in range(3000)],
        "mapping": {f"key {n}": (n, None if n % 2 else b"bytes" * n) for n in range(3000)},
        "numpy": [np.float32(n) if n % 2 else np.longlong(n) for n in range(3000)],
        "tuples": tuple({"n": n, "words": [str(n)] * 3, "yes": n % 2 == 0} for n in range(3000)),
    }
    shared = share_attributes(Holder(first=first, **values), least_nbytes=1)
    for name, value in values.items():
        store = store_of(getattr(shared, name))
        assert store.buffer.begin >= first.nbytes
        assert store.image is not None
        path = tmp_path / f"{name}.arrow"
        store.save(path)
        assert path.stat().st_size < store.nbytes + 20_000
        opened = open_store(path)
        assert alike(opened, value), name
        pickled, buffers = pack(opened)
        assert not buffers
        again = unpack(pickled, buffers)
        again.save(tmp_path / f"{name}-again.arrow")
        assert alike(open_store(tmp_path / f"{name}-again.arrow"), value)


def test_what_refers_to_another_part_is_copied_to_be_saved(tmp_path: Any) -> None:
    clips = Clips()
    shared = share(clips)
    assert shared.frames.image is not None
    assert shared.by_video.image is None
    shared.by_video.save(tmp_path / "videos.arrow")
    assert (tmp_path / "videos.arrow").stat().st_size < 1.1 * FRAMES * FRAME_NBYTES
    opened = open_store(tmp_path / "videos.arrow")
    assert list(opened) == list(clips.by_video)
    assert all(same(opened[key], clips.by_video[key]) for key in clips.by_video)
    part = shared.by_class.pairs[2:4]
    part.save(tmp_path / "part.arrow")
    assert list(open_store(tmp_path / "part.arrow")) == list(clips.by_class.items())[2:4]


def test_rows_of_another_list_are_arrow_data_like_any_other(tmp_path: Any) -> None:
    rows = records()
    shared = share(Holder(rows=rows, some=rows[::-2]))
    assert shared.some.image is None
    assert shared.some.describe().kind == "records"
    assert shared.some.column("label").take([0, 5]).tolist() == [9, 9]
    assert shared.some.take(range(300))["path"] == [row["path"] for row in rows[::-2][:300]]
    assert shared.some.to_arrow().to_pylist() == rows[::-2]
    shared.some.save(tmp_path / "some.arrow")  # of a type that any program can read
    with pa.ipc.open_file(tmp_path / "some.arrow") as file:
        assert file.read_all().to_pylist() == rows[::-2]
    shared.some[10:20].save(tmp_path / "slice.arrow")
    assert list(open_store(tmp_path / "slice.arrow")) == rows[::-2][10:20]


def test_views_of_the_same_memory_are_there_once() -> None:
    array, tensor = np.arange(1 << 18), torch.arange(1 << 18)
    other = np.asfortranarray(np.arange(1 << 18).reshape(512, 512))
    original = Holder(
        a=array, b=array[:], c=tensor, d=tensor[:], e=other, f=other[:], g=array[1:], h=array.view(np.uint64)
    )
    shared = share(original)
    whole = store_of(shared.a).buffer.whole
    assert whole.nbytes < 5 * array.nbytes + 10 * 4096  # g and h are other items
    for name, value in vars(original).items():
        assert same(value, np.asarray(getattr(shared, name)) if isinstance(value, np.ndarray) else value), (
            name
        )
    assert torch.equal(shared.d, tensor)


def test_a_conjugate_is_not_what_it_is_a_view_of() -> None:
    tensor = torch.randn(10, dtype=torch.complex64)
    with StoreGroup(3) as group:
        for value in (tensor, tensor.conj(), tensor):
            group.add(write_store, value)
        stores = group.finish()
    assert torch.equal(stores[0].tensor, tensor)
    assert torch.equal(stores[1].tensor, tensor.conj())
    assert [store.image is None for store in stores] == [False, False, True]


def test_what_failed_is_not_referred_to(caplog: pytest.LogCaptureFixture) -> None:
    """Its memory is the next one's."""
    frames = arrays()
    bad = [{"frame": frame, "more": 1} for frame in frames for _ in range(10)]
    bad[-3]["more"] = threading.Lock()  # type: ignore[assignment]
    with caplog.at_level(logging.INFO, "shmloader"):
        shared = share(Holder(bad=bad, good={n: frames[n::10] for n in range(10)}))
    assert "left Holder.bad" in caplog.text
    assert shared.bad is bad
    assert shared.good.buffer.begin == 0
    assert all(same(shared.good[n], frames[n::10]) for n in range(10))


@pytest.mark.parametrize(
    ("wide", "deep", "by_number"),
    [(False, False, False), (False, True, False), (False, True, True), (True, False, False)],
)
def test_what_is_there_already_is_not_counted_as_needed(
    wide: bool, deep: bool, by_number: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second attribute over the same data would be refused for want of memory."""
    frames = [np.full((400 if wide else 8) << 10, n % 256, np.uint8) for n in range(300 if wide else 16_000)]
    by_key: Any = {n: frames[n * 5 : n * 5 + 5] for n in range(len(frames) // 5)}
    if deep:
        by_key = {n: {"clips": [some]} for n, some in by_key.items()}
    if by_number:
        by_key = list(by_key.values())
    nbytes = sum(frame.nbytes for frame in frames)
    small = Headroom(round(1.2 * nbytes), 2 * nbytes, "a small cgroup")
    nearly_full = Headroom(round(0.2 * nbytes), 2 * nbytes, "a small cgroup")
    rooms = iter([small])
    monkeypatch.setattr(room, "memory_headroom", lambda: next(rooms, nearly_full))
    shared = share(Holder(frames=frames, by_key=by_key))
    assert shared.frames.buffer.whole.nbytes < 1.1 * nbytes
    assert same(shared.by_key[17], by_key[17])
    rooms = iter([])
    with pytest.raises(SharedMemoryExhausted):
        share(Holder(by_key=by_key))


def test_columns_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST_IN_COLUMNS", 5000)
    rows = records()
    starts = share(rows).starts
    assert len(starts) == 3
    assert 3000 < starts[2] - starts[1] < 5000 < starts[1]
    shared = share_attributes(Holder(rows=rows, first=rows[:10_000], last=rows[-3000:]), least_nbytes=1)
    assert shared.first == rows[:10_000]
    assert shared.first.image is not None  # it refers to nothing
    assert shared.last == rows[-3000:]
    assert shared.last.image is None


def test_an_object_of_one_container_remembers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nobody to come for whom it would be worth it."""
    remembered, kinds = [], set()
    original = kept.Kept.take_over

    def take_over(self: Any, other: Any) -> None:
        remembered.append(sum(map(len, other._columns.values())))
        kinds.update(other._columns)
        original(self, other)

    monkeypatch.setattr(kept.Kept, "take_over", take_over)
    share(Holder(rows=records()))
    assert remembered == [0]
    share(Holder(rows=records(), more=texts()))
    assert remembered[1] > 0
    assert remembered[2] == 0
    share_attributes(Holder(some={n: f"{n} text " * 50 for n in range(100)}, more={0: 1}), least_nbytes=1)
    assert remembered[3] > 0
    assert kinds == {dict, str}  # of the items the tuples are nobody else's


def test_some_items_of_a_mapping_are_a_mapping() -> None:
    data = {f"key {n}": [n] * (n % 5) for n in range(2000)}
    part = share(data).alone(range(0, 2000, 3))
    wanted = dict(list(data.items())[::3])
    assert dict(part) == wanted
    assert list(part) == list(wanted)
    assert part["key 3"] == [3, 3, 3]
    assert "key 1" not in part


LIGHT = [
    np.arange(5000),
    torch.arange(5000),
    "text " * 500,
    [f"w{n}" for n in range(40)],
    Person("a", 1, ["b"] * 9),
]


@st.composite
def attributes_that_share(draw: st.DrawFn) -> dict[str, Any]:
    pool = draw(st.lists(SCALARS | ARRAYS | st.sampled_from(LIGHT), min_size=1, max_size=5))
    for _ in range(draw(st.integers(0, 6))):
        pool.append(draw(containers(st.sampled_from(pool))))
    values = st.lists(st.sampled_from(pool), min_size=1, max_size=8)
    result: dict[str, Any] = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        rows = draw(values) * draw(st.sampled_from([1, 2, 30]))
        result[name] = rows if draw(st.booleans()) else dict(enumerate(rows))
    return result


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(attributes_that_share())
def test_attributes_that_share_come_back_as_they_were(tmp_path_factory: Any, attributes: Any) -> None:
    shared = share_attributes(Holder(**attributes), least_nbytes=0)
    for name, value in attributes.items():
        found = getattr(shared, name)
        assert same(plain(found), value)
        if hasattr(found, "save"):
            path = tmp_path_factory.mktemp("saved") / f"{name}.arrow"
            found.save(path)
            assert same(plain(open_store(path)), value)
